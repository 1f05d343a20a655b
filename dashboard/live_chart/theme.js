// The colors of the data, for each background.

import { el } from "./dom.js";

// Hues by Okabe and Ito, distinct for any color vision, with a lightness for each background. Several
// GPUs have the hues that the memory lines leave, the most distinct ones first.
const COLORS = {
  blue: ["#0068a8", "#5ab4ec"],
  orange: ["#cc5a00", "#f28e4c"],
  green: ["#008a66", "#2fc49a"],
  pink: ["#b04e8b", "#e39ac9"],
  amber: ["#a87400", "#e6bd4a"],
  gray: ["#6b7280", "#98a1ae"],
  gpu0: ["#7c2be4", "#8d5df8"],
  gpu1: ["#949c2c", "#c8ce2c"],
  gpu2: ["#161616", "#f5f5f5"],
  gpu3: ["#0bafda", "#2284b1"],
  gpu4: ["#8a0316", "#f9343c"],
  gpu5: ["#7d5a10", "#fad094"],
  gpu6: ["#db3cfc", "#9d7a6b"],
  gpu7: ["#0a4b39", "#b6fb3a"],
};
const palette = (ground) =>
  Object.fromEntries(Object.entries(COLORS).map(([name, pair]) => [name, pair[ground]]));
export const PALETTES = { light: palette(0), dark: palette(1) };

// Converts any CSS color to [r, g, b] with the browser.
function channels(node, color) {
  const probe = el("span", { style: `color:${color};display:none` });
  node.append(probe);
  const found = getComputedStyle(probe).color.match(/[\d.]+/g) || [0, 0, 0];
  probe.remove();
  return found.slice(0, 3).map(Number);
}

export function withAlpha(hex, alpha) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

// Sets the palette on `root`; returns the colors of Streamlit's theme and Plotly's template.
export function readTheme(root) {
  const css = getComputedStyle(root);
  const read = (name, fallback) => css.getPropertyValue(name).trim() || fallback;
  const [r, g, b] = channels(root, read("--st-background-color", "#ffffff"));
  const dark = 0.299 * r + 0.587 * g + 0.114 * b < 128;
  const palette = PALETTES[dark ? "dark" : "light"];
  for (const [name, value] of Object.entries(palette))
    root.style.setProperty(`--ss-${name}`, value);
  const ink = channels(root, read("--st-text-color", dark ? "#fafafa" : "#31333f"));
  const faded = (opacity) => `rgba(${ink.join()},${opacity})`;
  const text = faded(0.66);
  const font = { family: read("--st-font", "sans-serif"), color: text, size: 11 };
  const axis = { fixedrange: true, zeroline: false, gridcolor: faded(0.08), tickfont: font };
  const background = `rgb(${r},${g},${b})`;
  const layout = { font, paper_bgcolor: background, plot_bgcolor: background };
  Object.assign(layout, { xaxis: axis, yaxis: axis, hoverlabel: { bgcolor: background } });
  return { palette, background, text, line: faded(0.22), template: { layout } };
}
