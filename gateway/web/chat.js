// The conversation. Reasoning, text and tool calls are shown as they arrive; the user types in the results of tools.

import { chat } from "./api.js";
import { $, copyButton, el } from "./dom.js";
import { shownImages, startImages, takeImages } from "./images.js";
import { render } from "./markdown.js";

const EXAMPLES = ["Who are you?", "What is the capital of France?", "What is 17 plus 25?"];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
let messages = []; // as OpenAI's API has them
let running = null; // the AbortController of the current answer

export function startChat() {
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); say(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    say();
  });
  $("prompt").addEventListener("input", fit);
  $("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
  $("new").addEventListener("click", begin);
  $("settings").firstElementChild.addEventListener("submit", (event) => { event.preventDefault(); toggleSettings(); });
  $("settings-button").addEventListener("click", toggleSettings);
  startImages((text) => { $("messages").append(el("p", { className: "error", role: "alert" }, text)); follow(true); });
  begin();
}

function begin() {
  running?.abort();
  messages = [];
  takeImages();
  const examples = EXAMPLES.map((text) => {
    const button = el("button", { type: "button", textContent: text });
    button.addEventListener("click", () => { $("prompt").value = text; say(); });
    return button;
  });
  $("messages").replaceChildren(el("div", { className: "welcome" }, el("p", {}, "Ask the model anything."), ...examples));
  $("prompt").focus();
}

function toggleSettings() {
  const isOpen = !($("settings").hidden = !$("settings").hidden);
  $("settings-button").ariaExpanded = String(isOpen);
  (isOpen ? $("settings").querySelector("textarea") : $("prompt")).focus();
}

function fit() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function say() {
  const text = $("prompt").value.trim();
  if (running) return;
  const images = takeImages();
  if (!text && !images.length) return;
  $("prompt").value = "";
  fit();
  if (!messages.length) $("messages").replaceChildren();
  const parts = [...images.map((url) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])];
  messages.push({ role: "user", content: images.length ? parts : text });
  $("messages").append(el("article", { className: "user", ariaLabel: "You" }, ...shownImages(images), text));
  answer();
}

function request() {
  const given = Object.fromEntries([...new FormData($("settings").firstElementChild)].filter(([, value]) => value.trim()));
  const body = { model: "default", stream: true, stream_options: { include_usage: true } };
  body.messages = given.system ? [{ role: "system", content: given.system }, ...messages] : messages;
  for (const name of NUMBERS) if (given[name]) body[name] = Number(given[name]);
  if (given.thinking) body.chat_template_kwargs = { enable_thinking: given.thinking === "on" };
  if (given.tools) {
    try {
      body.tools = JSON.parse(given.tools);
    } catch (error) {
      throw new Error(`The tools in the settings are not valid JSON: ${error.message}`);
    }
    if (given.tool_choice) body.tool_choice = given.tool_choice;
  }
  return body;
}

async function answer() {
  const shown = new Answer(), message = { role: "assistant", content: "" };
  const abort = running = new AbortController();
  busy(true);
  try {
    for await (const chunk of chat(request(), abort.signal)) shown.add(chunk, message);
  } catch (error) {
    shown.failed(abort.signal.aborted ? "stopped" : error.message, !abort.signal.aborted);
  }
  if (running === abort) running = null;
  if (!shown.node.isConnected) return; // a new chat was begun
  messages.push(message);
  shown.end(message);
  busy(false);
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("messages").ariaBusy = String(is); // screen readers wait until the answer is complete
  if (is) for (const button of document.querySelectorAll("button.again")) button.remove(); // only the last answer has one
}

class Answer {
  constructor() {
    this.thoughts = el("div", { className: "text" });
    this.thinking = el("details", { open: true, hidden: true }, el("summary", {}, "Reasoning"), this.thoughts);
    this.text = el("div", { className: "text coming" });
    this.calls = el("div", { className: "calls" });
    this.foot = el("footer", { className: "hint" });
    this.node = el("article", { className: "assistant", ariaLabel: "Model" }, this.thinking, this.text, this.calls, this.foot);
    this.facts = [];
    this.started = performance.now();
    $("messages").append(this.node);
    follow(true);
  }

  add({ choices: [choice], usage }, message) {
    if (usage) this.usage = usage;
    if (!choice) return;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (content || thought || calls) this.first ??= performance.now();
    if (content) message.content += content;
    if (thought) this.thought = (this.thought ?? "") + thought;
    for (const { index, id, function: part } of calls ?? []) {
      message.tool_calls ??= [];
      const call = (message.tool_calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
      call.function.name += part.name ?? "";
      call.function.arguments += part.arguments ?? "";
    }
    this.reason = choice.finish_reason ?? this.reason;
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.draw(message); });
  }

  draw(message) {
    const atEnd = isAtEnd();
    if (this.thought) {
      this.thinking.hidden = false;
      this.thoughts.replaceChildren(render(this.thought));
      if (message.content && !this.isAnswering) {
        this.isAnswering = true;
        this.thinking.open = false;
      }
    }
    this.text.replaceChildren(render(message.content));
    this.calls.replaceChildren(...(message.tool_calls ?? []).map(shownCall));
    follow(atEnd);
  }

  failed(text, isError) {
    this.facts.push(text);
    if (isError) this.foot.before(el("p", { className: "error", role: "alert" }, text));
  }

  end(message) {
    cancelAnimationFrame(this.frame);
    this.draw(message);
    this.text.classList.remove("coming");
    this.foot.append(...(message.content ? [copyButton(() => message.content)] : []), this.again(), this.summary());
    if (message.tool_calls && this.reason) this.calls.append(resultForm(message.tool_calls));
    follow(true);
  }

  again() {
    const button = el("button", { type: "button", className: "quiet again", textContent: "Regenerate" });
    button.addEventListener("click", () => {
      messages.pop();
      this.node.remove();
      answer();
    });
    return button;
  }

  summary() {
    // Of the whole answer: the browser may get its events in one piece, so a rate behind the first token would be wrong.
    const tokens = this.usage?.completion_tokens, seconds = (performance.now() - this.started) / 1000;
    if (this.first) this.facts.unshift(`first token after ${((this.first - this.started) / 1000).toFixed(2)} s`);
    if (tokens) this.facts.unshift(`${tokens} tokens in ${seconds.toFixed(2)} s (${(tokens / seconds).toFixed(1)} tokens/s)`);
    if (this.reason === "length") this.facts.push("cut at the maximum length");
    return el("span", {}, this.facts.join(" · "));
  }
}

function shownCall({ function: { name, arguments: text } }) {
  return el("div", { className: "code" }, el("div", { className: "code-head" }, `Tool call: ${name}`), el("pre", {}, el("code", {}, text)));
}

// The form in which the user enters the results of tool calls.
function resultForm(calls) {
  const inputs = calls.map((call) => el("textarea", { rows: 2, required: true, ariaLabel: `Result of ${call.function.name}` }));
  const labels = calls.map((call, index) => el("label", {}, `Result of ${call.function.name}`, inputs[index]));
  const form = el("form", { className: "results" }, ...labels, el("button", { className: "primary", textContent: "Send results" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    calls.forEach((call, index) => messages.push({ role: "tool", tool_call_id: call.id, content: inputs[index].value }));
    form.replaceChildren(...inputs.map((input, index) => el("p", { className: "hint" }, `${calls[index].function.name}: ${input.value}`)));
    answer();
  });
  return form;
}

function isAtEnd() {
  const box = $("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function follow(wanted) {
  if (wanted) $("messages").scrollTop = $("messages").scrollHeight;
}
