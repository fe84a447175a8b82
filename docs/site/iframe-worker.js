// The search runs in a worker, and a browser starts no worker for a page that is opened as a file. There, a hidden frame runs
// the worker's script instead. The search looks for the name IFrameWorker to find its own files.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.receive(data));
      const script = inside.document.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      inside.document.body.append(script);
    }

    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
