// plotly.js once a page. Streamlit loads another version for its own charts, so the global name is
// left as it was and our reference kept apart.

import { el } from "./dom.js";

export function loadPlotly(url) {
  return (globalThis.stepscopePlotly ??= new Promise((resolve, reject) => {
    const before = globalThis.Plotly;
    const script = el("script", { src: url });
    script.onload = () => {
      resolve(globalThis.Plotly);
      if (before) globalThis.Plotly = before;
    };
    script.onerror = () => {
      script.remove();
      globalThis.stepscopePlotly = undefined;
      reject(new Error("The chart library could not be loaded; reload the page."));
    };
    document.head.append(script);
  }));
}
