// The line above the tiles: what the steps wait for, and what to try next. For a run of ours that is a
// setting, which a press puts into the sidebar; for a script's run it is words.

import { el, setAttribute, setText } from "./dom.js";

// What the line shows: its text, words after it, the label of the link and its title, and the tab with
// the details; null for no line. A setting that the sidebar already has is no link.
export function verdictContent(answer, settings) {
  const verdict = answer?.verdict;
  if (!verdict) return null;
  const { text, words, setting, tab } = verdict;
  if (!setting) return { text, words: words || "", link: null, title: null, ...(tab && { tab }) };
  if (settings?.[setting.field] === setting.value) {
    const place = setting.place ? ` (sidebar: ${setting.place})` : ""; // in a collapsed group
    return {
      text,
      words: `${setting.text} is set for the next run${place}.`,
      link: null,
      title: null,
    };
  }
  const title = `Set ${setting.text} in the sidebar, for the next run. This run does not change.`;
  return { text, words: "", link: `Apply ${setting.text} →`, title };
}

export class VerdictLine {
  // `take(setting)` and `open(tab)` are called for a press on the links.
  constructor(take, open) {
    this.take = take;
    this.pressedAt = null; // the header when the link was pressed; the script has not answered yet
    this.text = el("span", { class: "ss-verdict-text" });
    this.words = el("span", {});
    this.link = el("button", { class: "ss-verdict-link", onclick: () => this.press() });
    this.tab = null;
    const press = () => open(this.tab);
    this.more = el("button", { class: "ss-verdict-link", onclick: press }, "Memory tab →");
    const parts = [this.text, " ", this.words, " ", this.link, this.more];
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
    this.tab = content.tab ?? null;
    this.more.hidden = !content.tab;
  }
}
