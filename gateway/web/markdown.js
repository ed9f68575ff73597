// Markdown as models write it, as elements. There is no way from here to HTML: every text becomes a text node, a link
// needs a scheme of LINKS, an image becomes a link. Repetitions are bounded, so that no text takes long.

import { copyButton, el } from "./dom.js";

const LINKS = ["http:", "https:", "mailto:"];
const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])( +|$)/;
const ROW_OF_DASHES = /^[\s|:-]*-[\s|:-]*$/;
const INLINE = new RegExp(
  [
    "\\\\(?<escaped>[\\\\`*_{}\\[\\]()#+.!|~>-])",
    "(?<ticks>`{1,2})(?<code>[^`]+)\\k<ticks>",
    "\\*\\*(?=\\S)(?<strong>[\\s\\S]{1,2000}?)\\*\\*",
    "~~(?=\\S)(?<del>[\\s\\S]{1,2000}?)~~",
    "\\*(?=[^\\s*])(?<em>[^*]{1,2000})\\*",
    "(?<![\\w_])_(?=[^\\s_])(?<em2>[^_]{1,2000})_(?!\\w)",
    "!?\\[(?<text>[^\\[\\]]{0,500})\\]\\((?<target>[^\\s()<>]{1,2000})\\)",
    "(?<url>https?:\\/\\/[^\\s<>()\\[\\]\"`*]{0,2000}[^\\s<>()\\[\\]\"`*.,;:!?'])",
  ].join("|"),
  "g",
);

export function render(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replaceAll("\t", "    ").split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    let found;
    if (!line.trim()) at += 1;
    else if ((found = FENCE.exec(line))) at = fence(lines, at, found, nodes);
    else if ((found = HEADING.exec(line))) {
      nodes.push(el(`h${Math.min(6, found[1].length + 2)}`, {}, ...inline(found[2])));
      at += 1;
    } else if (RULE.test(line)) {
      nodes.push(el("hr"));
      at += 1;
    } else if (depth < MAX_DEPTH && QUOTE.test(line)) at = quote(lines, at, depth, nodes);
    else if (depth < MAX_DEPTH && ITEM.test(line)) at = list(lines, at, depth, nodes);
    else if (line.includes("|") && lines[at + 1]?.includes("|") && ROW_OF_DASHES.test(lines[at + 1])) {
      at = table(lines, at, nodes);
    } else at = paragraph(lines, at, nodes);
  }
  return nodes;
}

function fence(lines, at, [, mark, language], nodes) {
  const body = [];
  for (at += 1; at < lines.length && !lines[at].trim().startsWith(mark); at += 1) body.push(lines[at]);
  const code = el("code", {}, body.join("\n"));
  const head = el("div", { className: "code-head" }, el("span", {}, language), copyButton(() => code.textContent));
  nodes.push(el("div", { className: "code" }, head, el("pre", { tabIndex: 0 }, code)));
  return at + 1;
}

function quote(lines, at, depth, nodes) {
  const inner = [];
  for (; at < lines.length && QUOTE.test(lines[at]); at += 1) inner.push(lines[at].replace(QUOTE, ""));
  nodes.push(el("blockquote", {}, ...blocks(inner, depth + 1)));
  return at;
}

function list(lines, at, depth, nodes) {
  const [, indent, first] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first), items = [];
  for (let found; at < lines.length && (found = ITEM.exec(lines[at])); ) {
    if (/\d/.test(found[2]) !== isOrdered || found[1].length < indent.length) break;
    const inner = [lines[at].slice(found[0].length)], width = found[1].length + 2;
    for (at += 1; at < lines.length && belongs(lines, at, width); at += 1) inner.push(lines[at].slice(width));
    const parts = blocks(inner, depth + 1);
    // A single paragraph is the item's own text.
    items.push(el("li", {}, ...(parts[0]?.tagName === "P" ? [...parts[0].childNodes, ...parts.slice(1)] : parts)));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  nodes.push(isOrdered ? el("ol", { start: parseInt(first, 10) }, ...items) : el("ul", {}, ...items));
  return at;
}

function belongs(lines, at, width) {
  const line = lines[at].trim() ? lines[at] : lines[at + 1] ?? "";
  return line.trim() && line.search(/\S/) >= width;
}

function table(lines, at, nodes) {
  const cells = (line, name) => {
    const texts = line.trim().replace(/^\||\|$/g, "").split("|");
    return el("tr", {}, ...texts.map((text) => el(name, {}, ...inline(text.trim()))));
  };
  const head = el("thead", {}, cells(lines[at], "th")), body = el("tbody");
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) body.append(cells(lines[at], "td"));
  nodes.push(el("div", { className: "wide" }, el("table", {}, head, body)));
  return at;
}

function paragraph(lines, at, nodes) {
  const text = [lines[at]];
  const ends = (line) => !line.trim() || [FENCE, HEADING, RULE, QUOTE, ITEM].some((each) => each.test(line));
  for (at += 1; at < lines.length && !ends(lines[at]); at += 1) text.push(lines[at]);
  nodes.push(el("p", {}, ...inline(text.join("\n"))));
  return at;
}

function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  let end = 0;
  for (const { index, 0: whole, groups } of text.matchAll(INLINE)) {
    if (index > end) nodes.push(text.slice(end, index));
    end = index + whole.length;
    nodes.push(span(whole, groups, depth + 1));
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

function span(whole, groups, depth) {
  if (groups.escaped) return groups.escaped;
  if (groups.code) return el("code", {}, groups.code);
  if (groups.strong) return el("strong", {}, ...inline(groups.strong, depth));
  if (groups.del) return el("del", {}, ...inline(groups.del, depth));
  if (groups.em || groups.em2) return el("em", {}, ...inline(groups.em || groups.em2, depth));
  return link(whole, groups);
}

function link(whole, { text, target, url }) {
  const href = URL.canParse(target ?? url) ? new URL(target ?? url) : null;
  if (!href || !LINKS.includes(href.protocol)) return whole;
  return el("a", { href: href.href, target: "_blank", rel: "noopener noreferrer", title: href.href }, text || href.href);
}
