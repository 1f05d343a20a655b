// Numbers to text. Pure: no DOM. Units are those of stepscope/metrics/ (bytes, seconds, percent).

export const MISSING = "n/a";
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// Three significant digits without exponent: 0, 2.10, 12.3, 812, 12,345.
export function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

// Four significant digits, for losses and weights; tiny and huge values get an exponent.
export function precise(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return size >= 1000 ? short(value) : value.toPrecision(4);
}

export function percent(value) {
  const digits = value === 0 || Math.abs(value) >= 1 ? 0 : Math.abs(value) >= 0.1 ? 1 : 2;
  return `${value.toFixed(digits)} %`;
}

// The unit in which `value` is drawn, and what to divide by.
export function scaleFor(unit, value) {
  const size = Math.abs(value || 0);
  if (unit === "B" || unit === "B/s") {
    const power = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(size, 1)) / 10)));
    return { unit: BYTE_UNITS[power] + unit.slice(1), factor: 2 ** (10 * power) };
  }
  if (unit === "s" && size < 1) {
    return size >= 1e-3 ? { unit: "ms", factor: 1e-3 } : { unit: "µs", factor: 1e-6 };
  }
  if (unit === "TFLOP/s" && size < 1) {
    return size >= 1e-3 ? { unit: "GFLOP/s", factor: 1e-3 } : { unit: "MFLOP/s", factor: 1e-6 };
  }
  return { unit: unit === "count" ? "" : unit, factor: 1 };
}

export function withUnit(value, unit) {
  if (!isNumber(value)) return MISSING;
  if (unit === "") return precise(value);
  if (unit === "%") return percent(value);
  if (unit === "count") return Math.round(value).toLocaleString("en-US");
  const scale = scaleFor(unit, value);
  const digits = unit === "W" || unit === "°C" || unit === "MHz" ? Math.round(value) : null;
  const number = digits === null ? short(value / scale.factor) : digits.toLocaleString("en-US");
  return unit === "1/s" ? `${number} /s` : `${number} ${scale.unit}`;
}

// ["12.3", "GiB of 80.0 (15 %)"], the two lines of a tile; the total's unit only where it is another.
export function bytesOf(value, total) {
  const [number, unit] = withUnit(value, "B").split(" ");
  if (!isNumber(total) || total <= 0) return [number, unit];
  const whole = withUnit(total, "B").replace(` ${unit}`, "");
  return [number, `${unit} of ${whole} (${percent((100 * value) / total)})`];
}

// "reserved 2.10 → 0.81 GiB": both in the unit of the larger, so that they compare at a glance.
export function change(label, unit, before, after) {
  if (!isNumber(before) || !isNumber(after)) {
    return `${label} ${withUnit(before, unit)} → ${withUnit(after, unit)}`;
  }
  if (unit !== "B") return `${label} ${withUnit(before, unit)} → ${withUnit(after, unit)}`;
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

// Round whole steps inside [from, to]: at most some `count` of them.
export function stepTicks(from, to, count) {
  const raw = Math.max(1, (to - from) / count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const every = power * [1, 2, 5, 10].find((many) => many * power >= raw * (1 - 1e-9));
  const values = [];
  for (let tick = Math.ceil(from / every); tick * every < to; tick += 1) values.push(tick * every);
  return { values, text: values.map((value) => value.toLocaleString("en-US")) };
}

const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400,
];

// Round clock times inside [from, to]: at most `count` of them. Below a second, plain numbers.
export function timeTicks(from, to, count) {
  const raw = (to - from) / count;
  const decimal = raw < 1 ? 10 ** Math.ceil(Math.log10(Math.max(raw, 1e-3))) : null;
  const step =
    decimal || TIME_STEPS.find((candidate) => candidate >= raw) || 86400 * Math.ceil(raw / 86400);
  const values = [];
  for (let tick = Math.ceil(from / step - 1e-9); tick * step <= to; tick += 1)
    values.push(tick * step);
  const text = values.map((value) => (step < 1 ? `${short(value)} s` : clock(value)));
  return { values, text };
}
