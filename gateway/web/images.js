// Images of the next message: chosen, pasted or dropped by the reader, and shown as they will be sent.

import { $, el } from "./dom.js";

let attached = []; // data URLs
let isAllowed = false; // the model reads images

export function startImages(failed) {
  const add = (files) => attach([...files], failed);
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => { add($("file").files); $("file").value = ""; });
  $("prompt").addEventListener("paste", (event) => {
    if (!isAllowed || !event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  for (const name of ["dragover", "drop"]) {
    $("talk").addEventListener(name, (event) => {
      if (!isAllowed || !event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      if (name === "drop") add(event.dataTransfer.files);
    });
  }
}

export function allowImages(modalities) {
  isAllowed = (modalities ?? []).includes("image");
  $("attach").hidden = !isAllowed;
}

// The images for the next message, which are not attached any more.
export function takeImages() {
  const taken = attached;
  attached = [];
  show();
  return taken;
}

export function shownImages(urls) {
  return urls.map((src, index) => el("img", { src, alt: `Image ${index + 1}` }));
}

async function attach(files, failed) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) {
      failed(`${file.name} is no image`);
      continue;
    }
    try {
      attached.push(await dataUrl(file));
    } catch (error) {
      failed(`${file.name} cannot be read: ${error.message}`);
    }
  }
  show();
  $("prompt").focus();
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function show() {
  $("attached").hidden = !attached.length;
  $("attached").replaceChildren(...shownImages(attached).map((image, index) => {
    const button = el("button", { type: "button", className: "quiet", title: "Remove", ariaLabel: `Remove image ${index + 1}` }, image);
    button.addEventListener("click", () => { attached.splice(index, 1); show(); });
    return button;
  }));
}
