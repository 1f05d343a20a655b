// Numbers to text, without DOM. Units as in stepscope/common/metrics.py (bytes, seconds, percent).

export const MISSING = "n/a";
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const WHOLE_UNITS = ["count", "W", "°C", "MHz"];
// Smaller units of a value below 1.
const SMALLER = { s: ["ms", "µs"], "TFLOP/s": ["GFLOP/s", "MFLOP/s"] };

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const sum = (values) => values.reduce((total, value) => total + value, 0);

// Escapes a text for Plotly, which reads some HTML.
export const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

export const counted = (value) => value.toLocaleString("en-US");

// Three significant digits without exponent: 0, 2.10, 12.3, 812, 12,345.
export function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return counted(Math.round(value));
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

// Four significant digits, for losses and weights; tiny and huge values have an exponent.
export function precise(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return size >= 1000 ? short(value) : value.toPrecision(4);
}

export function percent(value) {
  const digits = value === 0 || Math.abs(value) >= 1 ? 0 : Math.abs(value) >= 0.1 ? 1 : 2;
  return `${value.toFixed(digits)}%`;
}

// Returns the unit in which `value` is drawn, and its divisor.
export function scaleFor(unit, value) {
  const size = Math.abs(value || 0);
  if (unit === "B" || unit === "B/s") {
    const power = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(size, 1)) / 10)));
    return { unit: BYTE_UNITS[power] + unit.slice(1), factor: 2 ** (10 * power) };
  }
  if (unit in SMALLER && size < 1) {
    const [thousandth, millionth] = SMALLER[unit];
    return size >= 1e-3 ? { unit: thousandth, factor: 1e-3 } : { unit: millionth, factor: 1e-6 };
  }
  return { unit: unit === "count" ? "" : unit, factor: 1 };
}

// A unit as it follows a number: "%", " ms", "".
export const suffix = (unit) => (unit === "%" ? unit : unit && ` ${unit}`);

export function withUnit(value, unit) {
  if (!isNumber(value)) return MISSING;
  if (unit === "") return precise(value);
  if (unit === "%") return percent(value);
  const scale = scaleFor(unit, value);
  const whole = WHOLE_UNITS.includes(unit);
  const number = whole ? counted(Math.round(value)) : short(value / scale.factor);
  return number + suffix(unit === "1/s" ? "/s" : scale.unit);
}

// ["12.3", "GiB of 80.0 (15%)"], the two lines of a tile; the total has a unit only if it differs.
export function bytesOf(value, total) {
  const [number, unit] = withUnit(value, "B").split(" ");
  if (!isNumber(total) || total <= 0) return [number, unit];
  const whole = withUnit(total, "B").replace(` ${unit}`, "");
  return [number, `${unit} of ${whole} (${percent((100 * value) / total)})`];
}

// "reserved 2.10 → 0.81 GiB": bytes are in the unit of the larger value.
export function change(label, unit, before, after) {
  if (unit !== "B" || !isNumber(before) || !isNumber(after))
    return `${label} ${withUnit(before, unit)} → ${withUnit(after, unit)}`;
  const scale = scaleFor("B", Math.max(before, after));
  return `${label} ${short(before / scale.factor)} → ${short(after / scale.factor)} ${scale.unit}`;
}

// 0:41, 12:05, 3:04:05.
export function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const two = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400,
];

// Round clock times inside [from, to]: at most `count` of them; plain numbers below a second.
export function timeTicks(from, to, count) {
  const raw = (to - from) / count;
  const decimal = raw < 1 ? 10 ** Math.ceil(Math.log10(Math.max(raw, 1e-3))) : null;
  const step =
    decimal || TIME_STEPS.find((candidate) => candidate >= raw) || 86400 * Math.ceil(raw / 86400);
  const values = [];
  for (let tick = Math.ceil(from / step - 1e-9) || 0; tick * step <= to; tick += 1)
    values.push(tick * step);
  return { values, text: values.map((value) => (step < 1 ? `${short(value)} s` : clock(value))) };
}
