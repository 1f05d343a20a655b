// The line above the tiles: what the steps wait for, and what to try next. For a run of ours that is a
// setting, which a press puts into the sidebar; for a script's run it is words.

import { el, setAttribute, setText } from "./dom.js";

// What the line shows: its text, words after it, the label of the link and its title, and a page
// that says more; null for no line. A setting that the sidebar has already is no link.
export function verdictContent(answer, settings) {
  const verdict = answer?.verdict;
  if (!verdict) return null;
  const { text, words, setting, page } = verdict;
  if (!setting) return { text, words: words || "", link: null, title: null, ...(page && { page }) };
  if (settings?.[setting.field] === setting.value) {
    const place = setting.place ? ` (sidebar: ${setting.place})` : ""; // its group may be folded
    return {
      text,
      words: `${setting.text} is set for the next run${place}.`,
      link: null,
      title: null,
    };
  }
  const title = `Puts ${setting.text} into the sidebar, for the next run. This run does not change.`;
  return { text, words: "", link: `Try ${setting.text} →`, title };
}

export class VerdictLine {
  // `take(setting)` is called for a press on the link.
  constructor(take) {
    this.take = take;
    this.pressedAt = null; // the header when the link was pressed; the script has not answered yet
    this.text = el("span", { class: "ss-verdict-text" });
    this.words = el("span", {});
    this.link = el("button", { class: "ss-verdict-link", onclick: () => this.press() });
    this.page = el("a", { class: "ss-verdict-link" });
    const parts = [this.text, " ", this.words, " ", this.link, this.page];
    const shown = { class: "ss-verdict", role: "note", "data-testid": "verdict", hidden: "" };
    this.node = el("p", shown, ...parts);
  }

  press() {
    const { header, answer } = this.store;
    const { setting } = answer.verdict;
    this.pressedAt = header;
    this.taken = { [setting.field]: setting.value };
    this.take(setting);
    this.update(this.store);
  }

  update(store) {
    this.store = store;
    const { answer, header } = store;
    const taken = this.pressedAt === header ? this.taken : {};
    const content = verdictContent(answer, { ...header?.settings, ...taken });
    this.node.hidden = !content;
    if (!content) return;
    setAttribute(this.node, "data-kind", answer.verdict.kind);
    setText(this.text, content.text);
    setText(this.words, content.words);
    setText(this.link, content.link || "");
    setAttribute(this.link, "title", content.title);
    this.link.hidden = !content.link;
    this.words.hidden = !content.words;
    this.page.hidden = !content.page;
    setText(this.page, content.page?.text || "");
    setAttribute(this.page, "href", content.page?.url ?? null);
  }
}
