// Elements. Text only ever becomes text: nothing here, or elsewhere in the page, parses HTML.

export const byId = (id) => document.getElementById(id);

/** An element with properties, attributes (those with a dash, and role) and children. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role" || key === "scope") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

export function setText(target, text) {
  const node = typeof target === "string" ? byId(target) : target;
  if (node.textContent !== text) node.textContent = text;
}

/** Text with fenced code set apart, as paragraphs and <pre>, in place of what the element has. */
export function showText(target, text) {
  const parts = [];
  let lines = [];
  let code = false;
  const flush = () => {
    const body = lines.join("\n");
    if (code || body.trim()) {
      parts.push(code ? element("pre", {}, element("code", { textContent: body })) : element("div", { textContent: body }));
    }
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (/^\s*(```|~~~)/.test(line)) {
      flush();
      code = !code;
    } else {
      lines.push(line);
    }
  }
  flush();
  target.replaceChildren(...parts);
}
