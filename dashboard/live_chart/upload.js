// Sends a snapshot file to the server, which writes it as it comes. Streamlit's own upload would
// hold it in the server's memory, beside a training.

import { mounting, parts, setText } from "./dom.js";
import { percent } from "./format.js";

// The sentence for a file that cannot be sent; null where it can.
export function fileRefusal({ name, size }, limit) {
  if (!/\.(pickle|pkl)$/i.test(name)) return "Choose a .pickle or .pkl file.";
  if (size > limit) return `The file has more than ${Math.round(limit / 2 ** 20)} MiB.`;
  return size ? null : "The file is empty.";
}

class UploadView {
  constructor(parent) {
    const upload = parts(`<div class="ss-root ss-upload" data-testid="snapshot-upload">
      <button type="button" class="ss-button" ref="button">Open a file…</button>
      <input type="file" accept=".pickle,.pkl" class="ss-spoken" tabindex="-1"
        aria-label="Snapshot file" ref="input">
      <span class="ss-upload-text" aria-live="polite" ref="text"></span>
    </div>`);
    Object.assign(this, upload, { root: upload.node });
    this.button.addEventListener("click", () =>
      this.request ? this.request.abort() : this.input.click(),
    );
    this.input.addEventListener("change", () => this.send(this.input.files[0]));
    parent.append(this.root);
  }

  configure({ limit }, setTriggerValue) {
    this.limit = limit;
    this.done = (name) => setTriggerValue("uploaded", name);
  }

  // Not by fetch, which does not tell how much has been sent.
  send(file) {
    this.input.value = "";
    if (!file) return;
    const refused = fileRefusal(file, this.limit);
    if (refused) return setText(this.text, refused);
    const request = (this.request = new XMLHttpRequest());
    request.upload.onprogress = ({ loaded, total }) =>
      setText(this.text, `${file.name}: ${percent((100 * loaded) / total)} sent`);
    request.onload = () => this.end(request);
    request.onerror = () => this.end(request, "The server is not responding.");
    request.onabort = () => this.end(request, "Not sent.");
    request.open("POST", `/api/snapshot?${new URLSearchParams({ name: file.name })}`);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.setRequestHeader("X-Stepscope", "1");
    request.send(file);
    setText(this.button, "Cancel");
    setText(this.text, `${file.name}: sending`);
  }

  end(request, trouble = null) {
    this.request = null;
    setText(this.button, "Open a file…");
    let answer = null;
    try {
      answer = JSON.parse(request.responseText);
    } catch {
      // said below
    }
    if (!trouble && request.status === 200 && answer?.name) {
      setText(this.text, "");
      this.done(answer.name);
    } else {
      setText(this.text, trouble || answer?.error || `The server answered ${request.status}.`);
    }
  }

  close() {
    this.request?.abort();
    this.root.remove();
  }
}

export const stepscopeUpload = mounting("stepscopeUploads", UploadView);
