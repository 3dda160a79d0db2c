/** Changes of what is on the page that leave alone what stays the same, so that nothing flickers. */

/** Elements whose own code is still to change them: one that has to become another is replaced. */
export const unfinished = new WeakSet();

/**
 * Make the children of an element, from one on, those that are given. What is equal stays, with what is
 * selected in it.
 * @param {Element} parent
 * @param {Node[]} wanted
 * @param {number} [from]
 */
export function reconcile(parent, wanted, from = 0) {
  let old = parent.childNodes[from] ?? null;
  let at = 0;
  while (old && at < wanted.length && old.isEqualNode(wanted[at])) {
    old = old.nextSibling;
    at += 1;
  }
  if (old && at < wanted.length && grown(old, wanted[at])) {
    old = old.nextSibling;
    at += 1;
  }
  while (old) {
    const next = old.nextSibling;
    old.remove();
    old = next;
  }
  parent.append(...wanted.slice(at));
}

/** Whether `old` could be made like `wanted` where it stands. */
function grown(old, wanted) {
  if (old.nodeType !== wanted.nodeType || unfinished.has(old)) return false;
  if (old.nodeType === Node.TEXT_NODE) {
    if (wanted.data.startsWith(old.data)) old.appendData(wanted.data.slice(old.data.length));
    else old.data = wanted.data;
    return true;
  }
  if (!old.cloneNode(false).isEqualNode(wanted.cloneNode(false))) return false;
  reconcile(old, [...wanted.childNodes]);
  return true;
}
