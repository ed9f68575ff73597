// The live view. Rates are differences of counters between two polls; percentiles are those of the last requests.

import { $, el, svg } from "./dom.js";

const SHOWN_MS = 120_000; // of the graph
const rates = [];
let before = null;

export function showTrouble(text) {
  $("trouble").textContent = text;
}

export function showStatus(status) {
  const now = performance.now(), numbers = status.metrics;
  showTrouble(status.ready ? "" : `The model is not ready: ${status.reason}`);
  if (!("llm_kv_blocks" in numbers)) { // a scheduler, or the model does not answer
    if (status.ready) showTrouble("This server has no model of its own. Open the page of a server that computes answers.");
    return;
  }
  const rate = (name) => before ? Math.max(0, numbers[name] - before.numbers[name]) / (now - before.now) * 1000 : 0;
  const generated = rate("llm_generated_tokens_total"), prompts = rate("llm_prompt_tokens_total");
  if (before) rates.push({ at: now, rate: generated });
  while (rates[0]?.at < now - SHOWN_MS) rates.shift();
  before = { now, numbers };
  if ($("live").hidden) return;
  const { llm_kv_blocks: blocks, llm_kv_blocks_held: held } = numbers;
  const accepted = numbers.llm_accepted_tokens_total / numbers.llm_drafted_tokens_total;
  const cached = numbers.llm_cached_prompt_tokens_total / numbers.llm_prompt_tokens_total;
  $("numbers").replaceChildren(
    ...number("Running", numbers.llm_requests_running, "requests in the batch"),
    ...number("Waiting", numbers.llm_requests_waiting, `${numbers.llm_tokens_waiting} prompt tokens`),
    ...number("KV blocks", `${held} / ${blocks}`, "held by running requests", held / blocks),
    ...number("Generated", short(generated), "tokens/s"),
    ...number("Prompts", short(prompts), "tokens/s"),
    ...number("Prefix cache", Number.isFinite(cached) ? `${(cached * 100).toFixed(0)} %` : "–", "of prompt tokens cached", cached),
    ...(Number.isFinite(accepted) ? number("Drafts", `${(accepted * 100).toFixed(0)} %`, "of drafted tokens accepted", accepted) : []),
  );
  $("graph").replaceChildren(graph(now));
  latency(status.last_requests);
  last(status.last_requests.slice(0, 20));
}

function number(name, value, what, share) {
  const bar = Number.isFinite(share) ? [el("meter", { value: share, ariaLabel: name })] : [];
  return [el("div", {}, el("dt", {}, name), el("dd", {}, el("b", {}, String(value)), el("small", {}, what), ...bar))];
}

function graph(now) {
  const top = Math.max(1, ...rates.map((each) => each.rate)), width = 600, height = 90;
  const points = rates.map(({ at, rate }) => [width - (now - at) / SHOWN_MS * width, height - rate / top * (height - 4)]);
  const line = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  const area = points.length ? `${points[0][0].toFixed(1)},${height} ${line} ${width},${height}` : "";
  const label = `now ${short(rates.at(-1)?.rate ?? 0)}, at most ${short(top)} tokens per second in the last two minutes`;
  return el("figure", {},
    svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      svg("polygon", { points: area }), svg("polyline", { points: line })),
    el("figcaption", { className: "hint" }, label));
}

function latency(requests) {
  const answered = requests.filter((each) => each.first_token_s !== null);
  const perToken = answered.filter((each) => each.num_generated_tokens > 1)
    .map((each) => (each.seconds - each.first_token_s) / (each.num_generated_tokens - 1));
  $("latency-of").textContent = `of the last ${answered.length} answers`;
  const row = (name, values) => [name, ...[0.5, 0.9, 0.99].map((share) => time(percentile(values, share)))];
  fill($("latency"), ["", "p50", "p90", "p99"], [
    row("First token", answered.map((each) => each.first_token_s)),
    row("Between tokens", perToken),
    row("Total", answered.map((each) => each.seconds)),
  ]);
}

function last(requests) {
  fill($("last"), ["Ended", "Result", "Prompt tokens", "Answer tokens", "First token", "Total", "Key"], requests.map((each) => [
    new Date(each.ended_at * 1000).toLocaleTimeString(), each.reason, each.num_prompt_tokens, each.num_generated_tokens,
    time(each.first_token_s), time(each.seconds), each.key,
  ]));
}

function fill(table, head, rows) {
  const row = (cells, name) => el("tr", {}, ...cells.map((cell) => el(name, {}, String(cell))));
  table.replaceChildren(el("thead", {}, row(head, "th")), el("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
}

function percentile(values, share) {
  return values.sort((a, b) => a - b)[Math.ceil(share * values.length) - 1] ?? null;
}

function time(seconds) {
  if (seconds === null) return "–";
  const ms = seconds * 1000;
  return ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}

function short(value) {
  return value && value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString();
}
