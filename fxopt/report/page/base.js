"use strict";
// Elements, formats and unpacking. Names from traces reach the document as text nodes only: nothing here parses HTML.

const $ = (id) => document.getElementById(id);

function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (key === "vars") for (const [variable, set] of Object.entries(value)) node.style.setProperty(variable, set);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  const held = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== "");
  const verbatim = name === "bdi" || name === "code"; // somebody's names and lines of source
  node.append(...held.map((child) => (typeof child === "string" && !verbatim ? glued(child) : child)));
  return node;
}

// A number and its unit stay on one line: profiler_core.quantities.glued, in the page.
const NUMBER_AND_UNIT = /(?<=\d) (?=(?:[num]?s|min|h|%|(?:[kMGTP]i?)?B(?:\/s)?|[kMGTP]?FLOP(?:\/s|\/byte)?|bytes?(?:\/s)?|bits?|[kMG]Hz)(?![\w/]))/g;
const glued = (text) => text.replace(NUMBER_AND_UNIT, "\u00a0");

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function unpack(id) {
  const holder = $(id);
  const bytes = fromBase64(holder.textContent.trim());
  holder.remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

// ---- formats ----

function digits(value) {
  const size = Math.abs(value);
  return size >= 99.95 ? value.toFixed(0) : size >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

// As profiler_core.quantities.duration.
function duration(ns) {
  if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
  if (Math.abs(ns) >= 119.5e9) {
    const whole = Math.round(ns / 1e9);
    return `${Math.trunc(whole / 60)} min ${Math.abs(whole) % 60} s`;
  }
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["us", 1e3]])
    if (Math.abs(ns) >= size * 0.9995) return `${digits(ns / size)} ${unit}`;
  return `${Math.round(ns)} ns`;
}

const seconds = (value) => duration(1e9 * value);

function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
}

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const count = (value, one, many) => `${value.toLocaleString("en")} ${value === 1 ? one : many || one + "s"}`;
const scientific = (value) => (known(value) ? value.toExponential(1).replace("e-", "e−") : "–");

function prefixed(value, unit) {
  for (const [prefix, size] of [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (Math.abs(value) >= size * 0.9995) return `${digits(value / size)} ${prefix}${unit}`;
  return `${Number.isInteger(value) ? value : Number(value.toPrecision(3))} ${unit}`;
}

function quantity(value, unit) {
  if (unit === "ns") return duration(value);
  if (unit === "1" || unit === "") return Number(value.toPrecision(3)).toString();
  if (["byte", "byte/s", "FLOP", "FLOP/s", "inst", "conflict"].includes(unit)) return prefixed(value, unit.replace("byte", "B"));
  return `${Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3))} ${unit}`;
}

// ---- small parts ----

function shorten(text, most) {
  if (text.length <= most) return text;
  const head = Math.ceil((most - 1) / 2);
  return `${text.slice(0, head)}…${text.slice(text.length - (most - 1 - head))}`;
}

// A name from a trace: isolated, for it may run from right to left, and shortened where it stands in a row.
function named(text, most = 90) {
  const shown = shorten(text, most);
  return el("bdi", { dir: "auto", title: shown === text ? null : shorten(text, 1500) }, shown);
}

// A sentence that somebody's names may be in.
const said = (text, most) => named(glued(text), most);

const fullName = (text) => el("code", { class: "full", tabindex: text.length > 400 ? "0" : null }, el("bdi", { dir: "auto" }, text));
const missing = (why = "not measured") => el("span", { class: "missing" }, why);
const sourced = (text, source) => el("span", { class: source, title: SOURCES[source] }, text);
const SOURCES = {
  measured: "measured on the machine",
  modelled: "modelled: computed from shapes and types, not measured",
  ceiling: "ceiling: what this device reached in a benchmark",
  carried: "carried over from an equal layer",
};

const meter = (share) => el("span", { class: "meter", "aria-hidden": "true" },
  el("i", { vars: { "--share": Math.max(0, Math.min(1, share || 0)) } }));

const timed = (ns, share) => el("span", { class: "timed" }, meter(share), el("span", null, duration(ns)));

function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return el("dl", null, shown.map(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
}

function simpleTable(caption, heads, rows, numbers = []) {
  const cell = (kind, value, index) => el(kind, { class: numbers.includes(index) ? "number" : null, scope: kind === "th" ? "col" : null }, value);
  return el("div", { class: "scroll" }, el("table", null,
    caption ? el("caption", null, caption) : null,
    el("thead", null, el("tr", null, heads.map((head, i) => cell("th", head, i)))),
    el("tbody", null, rows.map((row) => el("tr", null, row.map((value, i) => cell("td", value, i)))))));
}

const fileName = (path) => path.split(/[\\/]/).pop();
const place = (file, line) => (file ? `${fileName(file)}:${line}` : "");
