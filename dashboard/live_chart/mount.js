// How a view comes onto the page and leaves it again.

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
