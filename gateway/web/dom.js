// Elements are created only here, and text is always inserted as text, never as HTML.

export const $ = (id) => document.getElementById(id);

export function el(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

export function svg(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function copyButton(text) {
  const button = el("button", { type: "button", className: "quiet copy", textContent: "Copy" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here"; // browsers have a clipboard on https and localhost only
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
