// Elements, and texts for people. Shared by the report and by the page of `holdfast serve`; names are always text, never markup.
// Invisible characters, and those that change the text direction, are shown as escapes.
export function clean(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
}

export function count(number) {
  return Number(number).toLocaleString("en");
}

export function short(number) {
  if (number === null || number === undefined || Number.isNaN(number)) return "";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e5 || size < 1e-2) return number.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  return Number.isInteger(number) ? count(number) : String(Number(number.toPrecision(4)));
}

// With enough digits to show a difference between two runs.
export function exact(number) {
  if (!Number.isFinite(number)) return short(number);
  return Number.isSafeInteger(number) ? count(number) : String(Number(number.toPrecision(8)));
}

// JSON has no infinity: Python writes it as the text inf, which Number() does not know.
export function numeral(value) {
  if (value === null || value === undefined) return NaN;
  return { inf: Infinity, "-inf": -Infinity }[value] ?? Number(value);
}

// el("p", {class: "muted"}, "text", child): attributes are set one by one, texts become text nodes.
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

export function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}
