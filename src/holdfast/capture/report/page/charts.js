// The two plots: the difference of the runs over all steps, and over the calls of one step.
const chart = { measure: "rel", step: 0, steps: [], byStep: new Map() };

function startCharts() {
  const steps = new Set([...data.a.steps, ...data.b.steps, ...rows.step]);
  chart.steps = [...steps].sort((x, y) => x - y);
  for (let row = 0; row < rows.size; row++) {
    if (!chart.byStep.has(rows.step[row])) chart.byStep.set(rows.step[row], []);
    chart.byStep.get(rows.step[row]).push(row);
  }
  const isMeasured = ["rel", "abs", "ulp"].filter((name) => rows[name].some((value) => !Number.isNaN(value)));
  chart.measure = isMeasured[0] || "count";
  for (const name of [...isMeasured, "count"]) byId("measure").append(el("option", { value: name }, MEASURES[name]));
  byId("measure").addEventListener("change", (event) => { chart.measure = event.target.value; drawCharts(); });
  const shown = chart.steps.filter((step) => chart.byStep.has(step));
  for (const step of shown) byId("step-shown").append(el("option", { value: String(step) }, String(step)));
  chart.step = data.origin >= 0 ? rows.step[data.origin] : shown[0] ?? 0;
  byId("step-shown").addEventListener("change", (event) => showStep(Number(event.target.value)));
  byId("step-back").addEventListener("click", () => showStep(shown[shown.indexOf(chart.step) - 1] ?? chart.step));
  byId("step-on").addEventListener("click", () => showStep(shown[shown.indexOf(chart.step) + 1] ?? chart.step));
  new ResizeObserver(drawCharts).observe(byId("steps-plot"));
  showStep(chart.step);
}

function showStep(step) {
  chart.step = step;
  byId("step-shown").value = String(step);
  drawCharts();
}

function drawCharts() {
  drawSteps();
  drawDepth();
}

function amount(row, name) {
  const verdict = text("verdict", row);
  if (verdict === "EQUAL") return 0;
  if (verdict === "MISSING" || verdict === "UNKNOWN") return NaN;
  return rows[name][row];
}

// The larger of two amounts; a known difference wins over an unknown one, and that over 0.
function larger(x, y) {
  if (Number.isNaN(x)) return y > 0 ? y : x;
  if (Number.isNaN(y)) return x > 0 ? x : y;
  return Math.max(x, y);
}

function drawSteps() {
  const isCount = chart.measure === "count";
  const phases = PHASES.filter((phase) => rows.text.includes(phase));
  const series = phases.map((phase, at) => {
    const points = chart.steps.map((step) => ({ x: step, phase, value: sumUp(step, phase, isCount) }));
    return { name: phase, css: "s-" + PHASES.indexOf(phase), isLine: true, points, at };
  });
  const [from, to] = [chart.steps[0] ?? 0, chart.steps[chart.steps.length - 1] ?? 1];
  const pad = from === to ? 0.5 : 0;
  const first = data.origin >= 0 ? rows.step[data.origin] : null;
  drawPlot(byId("steps-plot"), {
    label: `${MEASURES[chart.measure]}, the largest of each step, by phase` + (first === null ? "" : `; the runs diverge at step ${first}`),
    xName: "step", yName: isCount ? "tensors" : MEASURES[chart.measure], from: from - pad, to: to + pad, isLinear: isCount, series,
    xTicks: pickTicks(chart.steps, 10).map((step) => [step, String(step)]),
    mark: first === null ? null : { x: first, text: "step " + first + ": the runs diverge", isAbove: true },
    describe: (point) => [`step ${point.x}, ${point.phase}`, describeAmount(point.value, isCount)],
    choose: (point) => chart.byStep.has(point.x) && showStep(point.x),
  });
}

function sumUp(step, phase, isCount) {
  let found = 0;
  for (const row of chart.byStep.get(step) || []) {
    if (text("phase", row) !== phase) continue;
    found = isCount ? found + (isDifferent(row) ? 1 : 0) : larger(found, amount(row, chart.measure));
  }
  return found;
}

function describeAmount(value, isCount) {
  if (isCount) return count(value) + " differ";
  const lane = laneOf(value);
  return lane ? LANES[lane] : MEASURES[chart.measure] + " " + short(value);
}

function drawDepth() {
  const name = chart.measure === "count" ? "rel" : chart.measure;
  const here = chart.byStep.get(chart.step) || [];
  const groups = new Map([...CLASSES].reverse().map((verdict) => [verdict, []]));
  const bands = [];
  here.forEach((row, x) => {
    const verdict = text("verdict", row), phase = text("phase", row);
    (groups.get(verdict) || groups.get("MISSING")).push({ x, row, value: amount(row, name) });
    const last = bands[bands.length - 1];
    if (last && last[2] === phase) last[1] = x + 0.5;
    else bands.push([x - 0.5, x + 0.5, phase]);
  });
  const series = [...groups].map(([verdict, points]) => ({ name: verdict, css: className(verdict), points }));
  const origin = here.indexOf(data.origin);
  drawPlot(byId("depth-plot"), {
    label: `${MEASURES[name]} of the ${count(here.length)} tensors of step ${chart.step}, in the order of the run`,
    xName: "tensors, in the order in which they were computed", yName: MEASURES[name], from: -0.5, to: Math.max(here.length - 0.5, 0.5), series, bands: bands.length < 40 ? bands : [],
    xTicks: roundTicks(here.length, 8),
    mark: origin < 0 ? null : { x: origin, text: "origin" },
    describe: ({ row, value }) => [fullName(row), `${text("phase", row)} ${text("kind", row)}, ${text("verdict", row)}`, describeAmount(value, false)],
    choose: (point) => openDetail(point.row),
  });
}
