// DOM building. Markup holds constants only; names, event texts and reasons, which others wrote,
// always go in as text.

// Build one element from markup: {node, ...}, with each element inside that has a `ref` by its name.
export function parts(markup) {
  const template = document.createElement("template");
  template.innerHTML = markup.trim().replace(/>\n\s*</g, "><");
  const node = template.content.firstElementChild;
  const found = { node };
  for (const part of node.querySelectorAll("[ref]")) {
    found[part.getAttribute("ref")] = part;
    part.removeAttribute("ref");
  }
  return found;
}

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Both write only what changed: an untouched node costs no style or layout work.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

// Show a sentence in a node of its own, which is hidden without one.
export function say(node, sentence) {
  setText(node, sentence || "");
  node.hidden = !sentence;
}

// Return what Streamlit calls: again on the same parent when `data` or the theme changes, also once
// a new version of the modules is loaded. `name` keeps the views on the page.
export function mounting(name, View) {
  const views = (globalThis[name] ??= new WeakMap());
  return ({ data, parentElement, setTriggerValue }) => {
    let view = views.get(parentElement);
    if (!view) views.set(parentElement, (view = new View(parentElement)));
    view.configure(data, setTriggerValue);
    return () => {
      view.close();
      views.delete(parentElement);
    };
  };
}

// plotly.js once a page. Streamlit loads another version for its own charts, so the global name is
// left as it was and our reference kept apart.
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
