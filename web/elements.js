// @ts-check
// The elements: what they share. What each of them shows is in live.js, bell.js and more.js.

import { Headcount, LIVE, MORE, load } from './client.js';

const GRACE_MS = 2_000; // how long a user stays whose element is elsewhere: it may come back

/** @type {new () => HTMLElement} */
const Element = /** @type {any} */ (globalThis.HTMLElement ?? class {});

/** What all elements share: attributes that are properties as well, and changes that are gathered. */
export class Shell extends Element {
  /** @type {number | undefined} */ #value;
  /** @type {AbortController | undefined} */ #end;
  #due = false;

  /** The number shown, or undefined. */
  get count() {
    return this.#value;
  }

  connectedCallback() {
    // What a library has set before this file was loaded hides the properties.
    for (const [name, value] of Object.entries(this)) {
      if (!properties.has(name)) continue;
      delete (/** @type {any} */ (this)[name]);
      /** @type {any} */ (this)[name] = value;
    }
    this.#changed();
  }

  disconnectedCallback() {
    this.#changed();
  }

  attributeChangedCallback(/** @type {string} */ _, /** @type {string | null} */ before, /** @type {string | null} */ now) {
    if (before !== now) this.#changed();
  }

  /** All changes of a turn of the event loop are one: to another page without a leave in between. */
  #changed() {
    this.#value = undefined;
    if (this.#due) return;
    this.#due = true;
    queueMicrotask(() => {
      this.#due = false;
      const before = this.#end;
      this.#end = this.isConnected ? new AbortController() : undefined;
      if (this.#end) this.begin(this.#end.signal, (value) => (this.#value = value));
      before?.abort();
    });
  }

  /**
   * Shows what the attributes say, until the signal.
   * @param {AbortSignal} signal
   * @param {(value: number | undefined) => void} keep takes the number shown
   */
  begin(signal, keep) {}
}

/** @type {Set<string>} */ const properties = new Set(); // of all elements

/**
 * Defines an element, with a property for each attribute: under its own name, and in
 * camel case. Libraries set properties where there are some.
 * @param {string} tag
 * @param {any} element
 * @param {string[]} attributes
 */
export function define(tag, element, attributes) {
  for (const name of attributes) {
    const only = name === 'count-hidden'; // true unless it says false; the other flags are false unless they are there
    const flag = only || name === 'watch' || name === 'increment';
    for (const property of [name, name.replace(/-(.)/, (_, letter) => letter.toUpperCase())]) {
      properties.add(property);
      Object.defineProperty(element.prototype, property, {
        configurable: true,
        get() {
          const text = this.getAttribute(name);
          return flag ? (only || text !== null) && !/^false$/i.test(text) : (text ?? '');
        },
        set(value) {
          if (value == null || (value === false && !only)) this.removeAttribute(name);
          else this.setAttribute(name, value === true ? '' : value);
        },
      });
    }
  }
  if (globalThis.customElements && !customElements.get(tag)) customElements.define(tag, element);
}

// Another value of one of these draws the element anew; those of SAID are read when they are needed.
const DRAWN = 'page watch server storage count-hidden key counter increment format min zero one singular two few many other'.split(' ');
const SAID = 'label announce refused all none failed'.split(' ');

/**
 * Defines an element that shows a live number. What it shows is in other files.
 * @param {string} tag
 * @param {string} file its own part
 */
const late = (tag, file) => {
  const element = class extends Shell {
    static observedAttributes = DRAWN;

    /** @type {Headcount | undefined} */ #at; // the client that counts for it now

    /** @type {Shell['begin']} */
    begin(signal, keep) {
      const { page, server, storage, watch, countHidden } = /** @type {any} */ (this);
      const complain = (/** @type {any} */ error) => console.error(error.message);
      let early = () => {};
      this.#at = undefined;
      try {
        const headcount = (this.#at = Headcount.at({ server, storage }));
        if (!countHidden) headcount.countHidden = false;
        if (file === LIVE) {
          const stay = () => headcount.here(() => {}, { page: page || undefined, watch });
          early = stay();
          // The element may be put back soon, or another connection count the user: until then the user stays.
          signal.addEventListener('abort', () => {
            if (!this.isConnected || this.#at !== headcount) setTimeout(stay(), GRACE_MS);
          });
        }
        Promise.all([load(LIVE), load(file)])
          .then(([{ draw }, part]) => {
            if (!signal.aborted) part.default(draw(this, headcount, signal, keep));
            early();
          })
          .catch(complain);
      } catch (error) {
        complain(error);
      }
      signal.addEventListener('abort', early);
    }
  };
  define(tag, element, [...DRAWN, ...SAID]);
  return element;
};

/**
 * <live-count> shows how many people are on this page, the reader included.
 *
 *   singular="# person is reading" other="# people are reading"   the whole sentence, by
 *                       the plural of the page's language: zero, singular (or one), two, few, many, other
 *   min="5"             shows nothing under it
 *   page="…"            another page than this one
 *   watch               show the count without being counted
 *   server="https://…"  where the server is, if it is not where this file came from
 *   storage="none"      neither cookie nor storage: each tab is somebody else
 *   format="full"       "1,234" instead of "1.2K"; a sentence has that on large screens
 *   announce="…"        what a screen reader says, at most once a minute; {count} is the number, off is silence
 *   count-hidden="false"  a user who hides this tab for a minute is not counted
 *
 * The element shows its content until the first count is there. ::part(count) styles
 * the number, together with ::part(offline) while there is no connection,
 * ::part(refused) while the server does not let this page in, and ::part(stale) while
 * it cannot be sure that the count is right. An event `count` follows each change.
 */
export const LiveCount = late('live-count', LIVE);

/**
 * <unread-bell> shows how many notifications of the user are unread; a click
 * opens the list of the newest, which are read one by one or all.
 *
 *   label="…"     what the button is called; default "Notifications"
 *   announce="…"  as above
 *   all="…" none="…" failed="…"  words of the list: that all are to be read, that there
 *                 is nothing new, that it could not be loaded
 *
 * Its content takes the place of the bell. Style it with ::part(button),
 * ::part(count), --headcount-badge and --headcount-badge-ink, and the list with
 * ::part(list), ::part(item), ::part(all), --headcount-list and --headcount-list-ink.
 * An event `unread` follows each change, `read` what was read: its detail is the page,
 * or null for all. An event `open` comes before the list; prevent it to show your own.
 */
export const UnreadBell = late('unread-bell', './bell.js');

for (const tag of ['live-counter', 'like-button', 'follow-button']) late(tag, MORE);
