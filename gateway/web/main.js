// The choice between the two views, and the state of the server in the page's header.

import { $ } from "./dom.js";
import { startChat } from "./chat.js";
import { allowImages } from "./images.js";
import { showStatus, showTrouble } from "./live.js";
import { call } from "./api.js";

const EVERY_MS = { live: 1000, chat: 5000 };
let timer = 0;

function view() {
  return location.hash === "#live" ? "live" : "chat";
}

function show() {
  for (const name of ["chat", "live"]) {
    $(name).hidden = name !== view();
    $(`to-${name}`).ariaCurrent = name === view() ? "page" : null;
  }
  if (view() === "chat") $("prompt").focus();
  poll();
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return; // the page is not visible
  try {
    const status = await (await call("status")).json();
    head(status.ready ? "ready" : "waiting", status.ready ? "ready" : status.reason, status.model);
    showStatus(status);
    allowImages(status.input_modalities);
  } catch (error) {
    head("gone", error.message);
    showTrouble(error.message);
  }
  clearTimeout(timer); // of another poll, begun meanwhile
  timer = setTimeout(poll, EVERY_MS[view()]);
}

function head(state, label, model) {
  $("state").className = `dot ${state}`;
  $("state").title = $("state").ariaLabel = label;
  if (model) document.title = $("model").textContent = model;
}

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", poll);
startChat();
show();
