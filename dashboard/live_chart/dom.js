// Building and updating DOM nodes. Markup holds constants only; names, event texts and reasons come
// from other people, so they are always set as text.

// Builds one element from markup: {node, ...}, with each inner element that has a `ref` by its name.
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
    if (name.startsWith("on")) node[name] = value;
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const button = (onclick, attributes, ...children) =>
  el("button", { type: "button", onclick, ...attributes }, ...children);

// These functions write only changes: an untouched node costs no style or layout work.

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function showText(node, text) {
  setText(node, text || "");
  node.hidden = !text;
}

// Turns `node` into `fresh` in place: nodes that stay keep focus, selection and scroll position.
export function morph(node, fresh) {
  if (node.nodeName !== fresh.nodeName) return node.replaceWith(fresh);
  if (node.nodeType === Node.TEXT_NODE) return setText(node, fresh.data);
  for (const name of node.getAttributeNames()) setAttribute(node, name, fresh.getAttribute(name));
  for (const name of fresh.getAttributeNames()) setAttribute(node, name, fresh.getAttribute(name));
  node.onclick = fresh.onclick;
  return render(node, ...fresh.childNodes);
}

export function render(node, ...children) {
  const before = [...node.childNodes];
  before.slice(children.length).forEach((child) => child.remove());
  children.forEach((child, i) => (before[i] ? morph(before[i], child) : node.append(child)));
}

// Sets the children of a node. A child that stays is not moved: moving it would close its popover.
export function setChildren(node, children) {
  const kept = new Set(children);
  for (const child of [...node.children]) if (!kept.has(child)) child.remove();
  children.forEach((child, i) => {
    if (node.children[i] !== child) node.insertBefore(child, node.children[i] ?? null);
  });
}

// Returns the function that Streamlit calls to mount a view, and again when `data` or the theme
// changes. `name` holds the mounted views, also across versions of the modules.
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

// Loads plotly.js once per page. Streamlit's own charts use another version, so the global name is
// restored.
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
      reject(new Error("The chart library could not be loaded. Reload the page."));
    };
    document.head.append(script);
  }));
}
