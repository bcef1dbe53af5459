// Decodes the data of the page: columns by name, and texts by number. Names are always text, never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const ROLE = new Set(["ORIGIN", "PROPAGATED", "CLOSE", "MISSING", "EQUAL"]);
const CLASSES = [...ROLE, ...(data.counts.UNKNOWN ? ["UNKNOWN"] : [])];
const MEANING = {
  ORIGIN: "differs, its inputs do not",
  PROPAGATED: "differs because its inputs do",
  CLOSE: "within the tolerance",
  MISSING: "in one run only",
  EQUAL: "the same bytes",
  UNKNOWN: "could not be compared",
};
const EXPLAINED = {
  ORIGIN: "ORIGIN: this tensor differs although everything that it was computed from is equal. The cause is in this call.",
  PROPAGATED: "PROPAGATED: this tensor differs because something that it was computed from differs. The cause is earlier.",
  CLOSE: "CLOSE: the difference is within the tolerance.",
  MISSING: "MISSING: only one of the two runs has this tensor.",
  EQUAL: "EQUAL: both runs have the same bytes.",
  UNKNOWN: "UNKNOWN: the digests are of different kinds, and neither values nor statistics were kept.",
};
const NUMBERS = ["rel", "abs", "cos", "sqnr", "ulp", "mismatch"];
const TEXTS = ["phase", "kind", "fqn", "path", "verdict", "dtype", "shape", "module", "source", "pairing", "note", "bad"];
const COUNTS = ["step", "rank", "call"];

const rows = decode(data);

function decode(raw) {
  const columns = { size: raw.columns.step.length };
  for (const name of COUNTS) columns[name] = Int32Array.from(raw.columns[name]);
  for (const name of NUMBERS) columns[name] = Float64Array.from(raw.columns[name], (x) => (x === null ? NaN : Number(x)));
  for (const name of TEXTS) columns[name] = Uint32Array.from(raw.columns[name]);
  columns.text = raw.strings.map(clean);
  columns.lower = columns.text.map((text) => text.toLowerCase());
  return columns;
}

function text(column, row) {
  return rows.text[rows[column][row]];
}

function fullName(row) {
  return (text("fqn", row) || "(the model)") + text("path", row) + (rows.call[row] ? " #" + rows.call[row] : "");
}

function className(verdict) {
  return ROLE.has(verdict) ? "c-" + verdict.toLowerCase() : "c-other";
}

function isDifferent(row) {
  const verdict = text("verdict", row);
  return !["EQUAL", "CLOSE", "UNKNOWN"].includes(verdict);
}

// Beyond this, units in the last place mean nothing: small values of opposite sign are billions of units apart.
function ulps(number) {
  return number > 1000 ? "> 1000" : short(number);
}

function pill(verdict) {
  return el("span", { class: "pill " + className(verdict), title: EXPLAINED[verdict] }, verdict);
}
