// The conversation: sending, streaming, stopping, asking again.

import { ApiError, cancelRequest, firstModel, newRequestId, settings, streamChat } from "./api.js";
import { byId, element, setText, showText } from "./dom.js";

const log = byId("log");
const prompt = byId("prompt");
let messages = [];
let model = "";
let running = null;

const nearEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;
const scrollToEnd = () => log.scrollTo({ top: log.scrollHeight });

async function findModel() {
  model ||= await firstModel();
  setText("model", model);
  return model;
}

/** Ask for the model's name again, with the present key. Throws ApiError. */
export async function greet() {
  model = "";
  await findModel();
}

function bubble(role) {
  const body = element("div", { className: "body" });
  const who = element("div", { className: "who", textContent: role === "user" ? "You" : "Assistant" });
  const article = element("article", { className: `message ${role}` }, who, body);
  byId("empty").hidden = true;
  log.append(article);
  return { article, body };
}

function setRunning(value) {
  running = value;
  byId("send").hidden = Boolean(value);
  byId("stop").hidden = !value;
  byId("stop").disabled = false;
  log.setAttribute("aria-busy", String(Boolean(value)));
  for (const button of log.querySelectorAll("[data-again]")) button.hidden = Boolean(value);
}

/** The answer to all messages so far. */
async function answer() {
  const { article, body } = bubble("assistant");
  article.classList.add("busy");
  const control = { id: newRequestId(), abort: new AbortController(), stopped: false };
  setRunning(control);
  scrollToEnd();
  const began = performance.now();
  const state = { text: "", thought: "", first: 0, usage: null, timings: null, reason: null };
  let frame = 0;
  const draw = () => {
    frame = 0;
    const follow = nearEnd();
    showText(body, state.text);
    if (state.thought) showThought(article, body, state.thought);
    if (follow) scrollToEnd();
  };
  let failure = null;
  try {
    const start = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
    const events = streamChat(await findModel(), [...start, ...messages], control.id, control.abort.signal);
    for await (const event of events) {
      take(state, event, began);
      frame ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    if (!(control.stopped && (error.name === "AbortError" || error.code === "cancelled"))) failure = error;
  }
  cancelAnimationFrame(frame);
  draw();
  article.classList.remove("busy");
  if (state.text) messages.push({ role: "assistant", content: state.text });
  if (failure) article.append(element("p", { className: "error", role: "alert", textContent: words(failure) }));
  article.append(foot(state, control, began));
  for (const button of log.querySelectorAll("[data-again]")) if (!article.contains(button)) button.remove();
  setRunning(null);
  if (nearEnd() || control.stopped) scrollToEnd();
  if (failure instanceof ApiError && failure.status === 401) {
    document.dispatchEvent(new CustomEvent("key-needed"));
  }
}

function take(state, event, began) {
  if (event.usage) state.usage = event.usage;
  if (event.timings) state.timings = event.timings;
  for (const choice of event.choices ?? []) {
    const { content, reasoning_content: thought } = choice.delta ?? {};
    if (content || thought) state.first ||= performance.now() - began;
    state.text += content ?? "";
    state.thought += thought ?? "";
    state.reason = choice.finish_reason ?? state.reason;
  }
}

function showThought(article, body, text) {
  let details = article.querySelector("details");
  if (!details) {
    details = element(
      "details", {}, element("summary", { textContent: "Thought" }), element("div", { className: "thought" }),
    );
    article.insertBefore(details, body);
  }
  setText(details.lastChild, text);
}

function words(error) {
  if (error instanceof ApiError) return error.message;
  return error instanceof TypeError ? "The server cannot be reached." : String(error.message ?? error);
}

function foot(state, control, began) {
  const parts = [];
  if (control.stopped) parts.push("stopped");
  if (state.reason === "length") parts.push("cut at the limit");
  if (state.usage) parts.push(`${state.usage.completion_tokens} tokens`);
  if (state.timings?.predicted_per_second) parts.push(`${state.timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (state.first) parts.push(`first after ${seconds(state.first)}`);
  parts.push(`${seconds(performance.now() - began)} in all`);
  const cached = state.usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${state.usage.prompt_tokens} prompt tokens from cache`);
  const copy = element("button", { type: "button", className: "small", textContent: "Copy" });
  copy.addEventListener("click", () => copyText(copy, state.text));
  copy.hidden = !state.text;
  const again = element("button", {
    type: "button", className: "small", textContent: "Regenerate", "data-again": "",
  });
  again.addEventListener("click", regenerate);
  return element(
    "div", { className: "foot" }, element("span", { className: "stats", textContent: parts.join(" · ") }), copy, again,
  );
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

async function copyText(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here"; // the clipboard is for secure origins
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

export function send() {
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  fit();
  if (messages.at(-1)?.role === "user") messages.pop(); // it got no answer
  messages.push({ role: "user", content: text });
  showText(bubble("user").body, text);
  void answer();
}

/** Answer the last question again. */
export function regenerate() {
  if (running) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  if (messages.at(-1)?.role !== "user") return;
  log.lastElementChild.remove();
  prompt.focus();
  void answer();
}

/** End the answer that is coming; the server frees its lane and ends the stream. */
export async function stop() {
  const control = running;
  if (!control || control.stopped) return;
  control.stopped = true;
  byId("stop").disabled = true;
  prompt.focus();
  const heard = await cancelRequest(control.id).catch(() => false);
  if (!heard) control.abort.abort(); // it has not begun, or is over
  else setTimeout(() => control.abort.abort(), 2000);
}

export async function clear() {
  await stop();
  while (running) await new Promise((resolve) => setTimeout(resolve, 20));
  messages = [];
  for (const message of log.querySelectorAll(".message")) message.remove();
  byId("empty").hidden = false;
  prompt.focus();
}

/** Let the box be as high as its text. */
export function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}
