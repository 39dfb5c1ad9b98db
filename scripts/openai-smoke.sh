#!/usr/bin/env bash
# A quick look at any OpenAI endpoint: models, chat, completion, streaming, four requests at once, an error.
#
#     scripts/openai-smoke.sh [http://127.0.0.1:9337/v1] [MODEL]
#
# MODEL defaults to the first one the endpoint lists. A key, where one is needed, is taken from OPENAI_API_KEY.
# Needs curl and python3. Ends with 1 and a line that says what was wrong at the first check that fails.
set -euo pipefail

base=${1:-http://127.0.0.1:9337/v1}
base=${base%/}
model=${2:-}
seconds=${SMOKE_TIMEOUT_SECS:-120}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() {
    echo "FAILED: $1: $2" >&2
    exit 1
}

# request NAME PATH [BODY]: the body of the answer goes to $folder/NAME, its status to $status.
request() {
    local arguments=(--silent --show-error --no-buffer --max-time "$seconds" --output "$folder/$1")
    arguments+=(--write-out '%{http_code}' --header 'Content-Type: application/json')
    if [ -n "${OPENAI_API_KEY:-}" ]; then arguments+=(--header "Authorization: Bearer $OPENAI_API_KEY"); fi
    if [ $# -gt 2 ]; then arguments+=(--data "$3"); fi
    status=$(curl "${arguments[@]}" "$base$2" 2>"$folder/$1.error") ||
        fail "$1" "no answer from $base$2: $(cat "$folder/$1.error")"
}

# expect NAME STATUS CHECK: the status, and a Python expression over `answer`, the parsed body, that must hold.
expect() {
    [ "$status" = "$2" ] || fail "$1" "status $status instead of $2: $(head -c 300 "$folder/$1")"
    python3 -c '
import json, sys
answer = json.load(open(sys.argv[1]))
sys.exit(not eval(sys.argv[2]))' "$folder/$1" "$3" 2>/dev/null ||
        fail "$1" "this does not satisfy \"$3\": $(head -c 300 "$folder/$1")"
    echo "ok: $1"
}

# streamed NAME FIELD: events of JSON that bring text in FIELD, a finish reason, and [DONE] at the end.
streamed() {
    [ "$status" = 200 ] || fail "$1" "status $status instead of 200: $(head -c 300 "$folder/$1")"
    python3 - "$folder/$1" "$2" <<'PYTHON' || fail "$1" "$(tail -c 300 "$folder/$1")"
import json, sys
lines = [line[6:].strip() for line in open(sys.argv[1]) if line.startswith("data: ")]
if not lines or lines[-1] != "[DONE]":
    sys.exit("the stream does not end with [DONE]")
choices = [choice for line in lines[:-1] for choice in json.loads(line).get("choices", [])]
texts = [(c.get("delta") or {}).get("content") if sys.argv[2] == "delta" else c.get("text") for c in choices]
if not "".join(text or "" for text in texts):
    sys.exit("the stream brings no text")
if not any(choice.get("finish_reason") for choice in choices):
    sys.exit("the stream gives no finish reason")
PYTHON
    echo "ok: $1"
}

request models /models
expect models 200 'answer["data"][0]["id"]'
if [ -z "$model" ]; then
    model=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["data"][0]["id"])' "$folder/models")
fi
name=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$model")
few='"max_tokens": 8, "temperature": 0'
messages='"messages": [{"role": "user", "content": "Say hello."}], '"$few"

request chat /chat/completions "{\"model\": $name, $messages}"
expect chat 200 'answer["choices"][0]["message"]["content"] and answer["choices"][0]["finish_reason"]'

request completion /completions "{\"model\": $name, \"prompt\": \"1, 2, 3,\", $few}"
expect completion 200 'answer["choices"][0]["text"] and answer["usage"]["completion_tokens"] > 0'

request chat-stream /chat/completions "{\"model\": $name, $messages, \"stream\": true}"
streamed chat-stream delta

request completion-stream /completions \
    "{\"model\": $name, \"prompt\": \"1, 2, 3,\", $few, \"stream\": true}"
streamed completion-stream text

processes=()
for number in 1 2 3 4; do
    (
        request "parallel-$number" /completions "{\"model\": $name, \"prompt\": \"$number, \", $few}"
        expect "parallel-$number" 200 'answer["choices"][0]["text"]'
    ) &
    processes+=($!)
done
for process in "${processes[@]}"; do
    wait "$process" || exit 1
done

request error /chat/completions "{\"model\": $name, \"messages\": 7}"
expect error 400 'answer["error"]["message"]'

echo "all checks passed: $base serves $model"
