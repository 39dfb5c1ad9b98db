// Buttons, keys, settings and colours.

import { loadSettings, loadTheme, saveSettings, saveTheme, settings } from "./api.js";
import { clear, fit, greet, send, stop } from "./chat.js";
import { byId } from "./dom.js";
import { connect } from "./live.js";

const dialog = byId("settings");
const form = byId("settings-form");
const prompt = byId("prompt");
const THEMES = { auto: "as the system has them", light: "light", dark: "dark" };
let theme = loadTheme();

function showTheme() {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  byId("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
}

function openSettings(focus = "system") {
  if (!dialog.open) {
    // an open one may hold what is being typed
    for (const name of Object.keys(settings)) form.elements[name].value = settings[name];
    dialog.showModal();
  }
  form.elements[focus].focus();
}

/** What the form holds is valid from now on. */
function takeSettings() {
  const before = settings.api_key;
  for (const name of Object.keys(settings)) {
    const field = form.elements[name];
    settings[name] = field.validity?.valid === false ? "" : field.value.trim();
  }
  saveSettings();
  if (settings.api_key !== before) void start();
}

async function start() {
  try {
    await greet();
  } catch (error) {
    if (error.status === 401) openSettings("api_key");
  }
  connect();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !dialog.open) void stop();
});
byId("stop").addEventListener("click", () => void stop());
byId("new").addEventListener("click", () => void clear());
byId("open-settings").addEventListener("click", () => openSettings());
byId("reset").addEventListener("click", () => form.reset());
document.addEventListener("key-needed", () => openSettings("api_key"));
// "close" is queued behind what is typed next, so a question could be sent before it; "submit" and "cancel" are not.
form.addEventListener("submit", takeSettings);
dialog.addEventListener("cancel", takeSettings);
dialog.addEventListener("close", () => prompt.focus());
byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  saveTheme(theme);
  showTheme();
});
for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}

loadSettings();
showTheme();
void start();
