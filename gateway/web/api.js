// Requests to the server. The API key is kept until the tab is closed.

import { $ } from "./dom.js";

const KEY = "api-key";
let asking = null; // one dialog for all requests that wait for a key

export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await reason(response));
    if (key === sessionStorage.getItem(KEY)) await (asking ??= askForKey(key).finally(() => { asking = null; }));
  }
}

function askForKey(refused) {
  const dialog = $("key-dialog"), input = $("key");
  $("key-wrong").textContent = refused ? "The server rejects this key." : "";
  input.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      if (!input.value) return dialog.showModal(); // no request works without a key
      sessionStorage.setItem(KEY, input.value);
      resolve();
    };
  });
}

async function reason(response) {
  const body = await response.json().catch(() => ({}));
  return body.error?.message || body.error_msg || `the server answered ${response.status}`;
}

// The chunks of an answer, as OpenAI's API streams them.
export async function* chat(body, signal) {
  const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
