"use strict";
// A button that copies the text of the element that it names.
for (const button of document.querySelectorAll("button[data-copies]")) {
  const source = document.getElementById(button.dataset.copies);
  const said = button.textContent;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch { // not allowed: the reader copies the selected text
      getSelection().selectAllChildren(source);
      button.textContent = "selected";
      return;
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = said; }, 2000);
  });
}
