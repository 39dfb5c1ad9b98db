// What the page asks the server, and what it remembers between visits.

const KEPT = "skippy.settings";
const KEY = "skippy.api_key";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

function read(storage, name) {
  try {
    return storage.getItem(name);
  } catch {
    return null; // storage may be forbidden
  }
}

function write(storage, name, value) {
  try {
    if (value) storage.setItem(name, value);
    else storage.removeItem(name);
  } catch {
    // then it lasts as long as the page
  }
}

export const settings = { system: "", temperature: "", top_p: "", max_tokens: "", seed: "", api_key: "" };

export function loadSettings() {
  try {
    const kept = JSON.parse(read(localStorage, KEPT) ?? "{}");
    for (const name of ["system", ...NUMBERS]) if (typeof kept[name] === "string") settings[name] = kept[name];
  } catch {
    // not ours
  }
  settings.api_key = read(sessionStorage, KEY) ?? "";
}

export function saveSettings() {
  const { api_key: key, ...others } = settings;
  write(localStorage, KEPT, JSON.stringify(others));
  write(sessionStorage, KEY, key);
}

export function loadTheme() {
  const theme = read(localStorage, "skippy.theme");
  return theme === "light" || theme === "dark" ? theme : "auto";
}

export function saveTheme(theme) {
  write(localStorage, "skippy.theme", theme === "auto" ? "" : theme);
}

/** A request's own id. crypto.randomUUID exists on secure origins alone. */
export function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers(more = {}) {
  return settings.api_key ? { ...more, authorization: `Bearer ${settings.api_key}` } : more;
}

async function checked(response) {
  if (response.ok) return response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // no JSON: the status has to do
  }
  throw new ApiError(error.message ?? `HTTP ${response.status}`, response.status, error.code);
}

export async function firstModel() {
  const response = await checked(await fetch("/v1/models", { headers: headers() }));
  return (await response.json()).data[0].id;
}

/** End a request; false where it does not run any more. */
export async function cancelRequest(id) {
  const response = await fetch(`/v1/requests/${encodeURIComponent(id)}`, { method: "DELETE", headers: headers() });
  return response.ok;
}

/** The events of one streamed answer, as parsed JSON. Throws ApiError, also for an error in the stream. */
export async function* streamChat(model, messages, requestId, signal) {
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  const response = await checked(
    await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers({ "content-type": "application/json", "x-request-id": requestId }),
      body: JSON.stringify(body),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, response.status, event.error.code);
      yield event;
    }
  }
  throw new ApiError("the connection ended before the answer was complete", 0, "incomplete");
}

/** Subprotocols of the live feed: scripts can give a WebSocket no header. */
export function liveProtocols() {
  if (!settings.api_key) return ["skippy.live"];
  const bytes = String.fromCharCode(...new TextEncoder().encode(settings.api_key));
  const key = btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return ["skippy.live", `skippy.key.${key}`];
}
