// The chain as it is now, from the WebSocket /live.

import { cancelRequest, liveProtocols } from "./api.js";
import { byId, element, setText } from "./dom.js";

const SHOWN_SECS = 60;
const MAX_PAUSE_MS = 15000;
const rates = [];
let socket = null;
let timer = 0;
let pause = 1000;

/** Watch, with the present key; replaces a connection that is open. */
export function connect() {
  clearTimeout(timer);
  if (socket) socket.onclose = null;
  socket?.close();
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  socket = new WebSocket(`${scheme}//${location.host}/live`, liveProtocols());
  socket.onmessage = (message) => {
    pause = 1000;
    setLink("live", "live");
    show(JSON.parse(message.data));
  };
  socket.onclose = () => {
    setLink("offline", "offline");
    timer = setTimeout(connect, pause);
    pause = Math.min(2 * pause, MAX_PAUSE_MS);
  };
}

function setLink(state, text) {
  const chip = byId("link");
  chip.dataset.state = state;
  setText(chip, text);
}

function show(status) {
  const notice = byId("notice");
  notice.hidden = !status.unready;
  setText(notice, status.unready ?? "");
  setText("rate", status.tokens_per_second.toFixed(1));
  setText("running", String(status.running));
  setText("concurrency", `of ${status.concurrency}`);
  setText("queue", String(status.queue_depth));
  setText("capacity", `of ${status.queue_capacity}`);
  const { prompt_tokens: prompt, cached_tokens: cached } = status.totals;
  setText("cached", prompt ? `${Math.round((100 * cached) / prompt)} %` : "–");
  setText("hits", status.cache_lookups ? `${status.cache_hits} of ${status.cache_lookups} lookups` : "of prompt tokens");
  setText("kv", `${Math.round((100 * status.reserved_kv_tokens) / status.kv_tokens)} %`);
  setText("kv-of", `of ${status.kv_tokens.toLocaleString("en")} tokens`);
  showRate(status.tokens_per_second);
  showStages(status);
  showLast(status.last);
  showLanes(status.lanes);
}

function showRate(rate) {
  rates.push(rate);
  if (rates.length > SHOWN_SECS) rates.shift();
  const top = Math.max(1, ...rates);
  const step = 120 / (SHOWN_SECS - 1);
  const start = 120 - step * (rates.length - 1);
  const points = rates.map((value, i) => `${(start + i * step).toFixed(1)} ${(30 - (28 * value) / top).toFixed(1)}`);
  byId("spark-line").setAttribute("d", `M${points.join("L")}`);
  byId("spark-area").setAttribute("d", `M${start.toFixed(1)} 32L${points.join("L")}L120 32Z`);
}

function showStages({ stages, hops, times }) {
  const rows = stages.map((stage) => {
    const end = stage.layer_end ?? "…";
    const count = stage.layer_end === null ? "" : `${stage.layer_end - stage.layer_start} layers`;
    const row = element(
      "li",
      { title: stage.endpoint },
      element("strong", { textContent: stage.stage_id }),
      element("span", { textContent: `layers ${stage.layer_start}:${end}` }),
      element("span", { textContent: count }),
      ...timeLines(times.find((one) => one.index === stage.index)),
    );
    if (hops && hops.compute_stage === stage.index && stages.length > 1) row.dataset.slowest = "";
    return row;
  });
  byId("stages").replaceChildren(...rows);
  setText("hops", hops ? hopWords(stages, hops) : "");
}

/** What the last prompt took a stage, and then its way to the next one. */
function timeLines(times) {
  if (!times) return [];
  const lines = [element("span", { className: "time", textContent: `${ms(times.compute_ms)} here` })];
  if (times.bytes) {
    const hop = element("span", { className: "time", textContent: `${ms(times.write_ms + times.wait_ms)} hop →` });
    hop.title = `${ms(times.write_ms)} to write, ${ms(times.wait_ms)} waiting for room, ${times.chunks} chunks`;
    lines.push(hop);
  }
  return lines;
}

function hopWords(stages, hops) {
  const name = (index) => stages.find((stage) => stage.index === index)?.stage_id ?? `stage ${index}`;
  const compute =
    `Last prompt: ${name(hops.compute_stage)} was slowest, ` +
    `${ms(hops.compute_ms)} for ${hops.compute_tokens} tokens.`;
  if (!hops.edge_bytes) return compute;
  const size = `${Math.max(1, Math.round(hops.edge_bytes / 1024)).toLocaleString("en")} KiB`;
  const hop = ` Longest hop: ${name(hops.edge_stage)} → ${name(hops.edge_stage + 1)}, ${size}:`;
  return `${compute}${hop} ${ms(hops.edge_write_ms)} to write, ${ms(hops.edge_wait_ms)} waiting for room.`;
}

const ms = (value) => (value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`);

function showLast(last) {
  if (!last) return;
  const rest = Math.max(0, last.first_token_ms - last.restore_ms - last.prefill_ms);
  const parts = [
    ["queue", "queue", last.queue_ms], ["restore", "cache", last.restore_ms],
    ["prefill", "prefill", last.prefill_ms], ["first", "first token", rest], ["answer", "answer", last.answer_ms],
  ];
  const total = parts.reduce((sum, part) => sum + part[2], 0) || 1;
  const bar = parts.map(([kind, , value]) => {
    const piece = element("i", { className: `k-${kind}` });
    piece.style.flexGrow = String(value / total);
    piece.hidden = value / total < 0.001;
    return piece;
  });
  byId("last-bar").replaceChildren(...bar);
  byId("last-bar").setAttribute("aria-label", parts.map(([, name, value]) => `${name} ${ms(value)}`).join(", "));
  const perToken = last.generated_tokens > 1 ? last.answer_ms / (last.generated_tokens - 1) : 0;
  const facts = [["prompt", `${last.prompt_tokens} tokens, ${last.cached_tokens} cached`]];
  if (perToken) facts.push(["once round the chain", `${ms(perToken)} per token`]);
  byId("last").replaceChildren(
    ...parts.map(([kind, name, value]) => pair(name, ms(value), `k-${kind}`)),
    ...facts.map(([name, value]) => pair(name, value, "plain")),
  );
}

const pair = (name, value, kind) =>
  element("div", {}, element("dt", { className: kind, textContent: name }), element("dd", { textContent: value }));

function showLanes(lanes) {
  const body = byId("lanes");
  while (body.rows.length > lanes.length) body.deleteRow(-1);
  while (body.rows.length < lanes.length) body.append(laneRow());
  lanes.forEach((lane, index) => fillLane(body.rows[index], lane));
}

function laneRow() {
  const cancel = element("button", { type: "button", className: "small", textContent: "✕", title: "Cancel" });
  cancel.addEventListener("click", () => void cancelRequest(cancel.dataset.id));
  const cells = ["", "id", "n", "n", "n", "n"].map((className) => element("td", { className }));
  cells[0].append(element("span", { className: "state" }));
  cells[2].append(element("span"), element("small"));
  return element("tr", {}, ...cells, element("td", { className: "n" }, cancel));
}

function fillLane(row, lane) {
  const [state, id, prompt, answer, rate, time] = row.cells;
  state.firstChild.dataset.state = lane.state;
  setText(state.firstChild, lane.state);
  const busy = lane.request_id !== null;
  setText(id, busy ? lane.request_id.slice(0, 8) : "–");
  id.title = lane.request_id ?? "";
  setText(prompt.firstChild, busy ? String(lane.prompt_tokens) : "");
  setText(prompt.lastChild, lane.cached_tokens ? `${lane.cached_tokens} cached` : "");
  setText(answer, busy ? `${lane.generated_tokens} / ${lane.max_tokens}` : "");
  setText(rate, lane.tokens_per_second ? lane.tokens_per_second.toFixed(1) : "");
  setText(time, busy ? `${lane.running_secs.toFixed(1)} s` : "");
  const cancel = row.cells[6].firstChild;
  cancel.hidden = !busy;
  cancel.dataset.id = lane.request_id ?? "";
  cancel.setAttribute("aria-label", `Cancel request ${lane.request_id ?? ""}`);
}
