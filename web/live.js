// @ts-check
// What the elements show, and how a visitor is counted on a page that scripts change.
// headcount.js loads this file when a page has one of the elements.
//
// A number stands in the element's shadow. <live-count> can write the whole sentence
// around it. All elements of a document speak to screen readers through one polite
// live region, each at its turn.

const ANNOUNCE_MS = 60_000; // least time between two announcements
const LONGEST = 128; // code points of a page's name
const KEPT = 95; // of a longer one; '#' and the hash fill it up
const TOLD = 100; // so many different complaints are told once; after them nothing is
const FULL =
  'this document has elements for more than 100 pages and counters, which is the most for one connection; those beyond show nothing and count nobody. ' +
  'Use fewer elements, or let your server ask for many numbers at once: GET /-/counters and /api/v1/counters';

/** @typedef {import('./headcount.js').Headcount} Headcount */
/** @typedef {import('./headcount.js').Counter} Counter */
/**
 * What a part of the client gets to make an element of.
 * @typedef {object} Parts
 * @property {HTMLElement} element
 * @property {Headcount} headcount
 * @property {ShadowRoot} root of the element
 * @property {HTMLElement} number in the root; before there is a number it shows the content of the element
 * @property {(value: number, type: string, detail: any, words: string | null) => void} show shows a number and
 *   dispatches the event; words are what a screen reader hears unless the author has others, {count} in them is the
 *   number, and null is silence
 * @property {(value: number) => string} format
 * @property {() => void} forget shows the content of the element again
 * @property {(words: string) => void} say to a screen reader, at once
 * @property {(why: string | Error) => void} refuse strikes the number out, and tells the author of the page why there
 *   is none
 * @property {() => string | undefined} language of the element
 * @property {typeof dress} dress as all that this file exports, it is handed on: a part that imported this file would
 *   not be loaded either where this one was loaded at a second attempt, under another name
 * @property {typeof fitting} fitting
 * @property {AbortSignal} signal ends it
 */

/** @type {Set<string>} */ const told = new Set();

/** Tells the author of the page something, once. */
function tell(/** @type {string} */ words, /** @type {'error' | 'warn'} */ how = 'error') {
  if (told.has(words) || told.size >= TOLD) return;
  told.add(words);
  console[how](`Headcount: ${words}`);
}

/** What an error of a Headcount says to the author of the page. */
const reason = (/** @type {Error} */ error) =>
  error instanceof RangeError ? FULL : error.message.replace(/^Headcount: /, '');

// ---- where the visitor is

/**
 * Counts the user on a page, see Headcount.here.
 * @param {Headcount} headcount
 * @param {(counter: Counter | undefined, why?: string) => void} callback
 * @param {string | undefined} page
 * @param {boolean | undefined} watch
 * @param {() => string} address says the page's own name
 * @param {AbortSignal} signal
 */
export function attend(headcount, callback, page, watch, address, signal) {
  if (signal.aborted) return;
  /** @type {string | undefined} */ let name;
  /** @type {(() => void)[]} */ let undo = [];
  const present = () => !watch && name !== '*';
  // What a callback throws must not end halfway what is done here, nor reach the script that has changed the address.
  const unknown = (/** @type {string | undefined} */ why = undefined) => {
    try {
      callback(undefined, why);
    } catch (error) {
      reportError(error);
    }
  };
  let refused = false;
  const refuse = (/** @type {string} */ why) => {
    refused = true;
    const words = why === FULL ? why : `the page ${JSON.stringify(name)} is not counted: ${why}`;
    tell(words);
    unknown(words);
    try {
      if (present()) undo.push(headcount.join(stand(name ?? ''))); // the visitor is on the site all the same
    } catch {} // there is no room for another page
  };
  const move = () => {
    const next = fitting(page ?? address());
    if (next === name) return;
    // First, so that there is room. What happens in one turn of the event loop is no leave.
    for (const step of undo) step();
    undo = [];
    if (name !== undefined) unknown();
    name = next;
    refused = false;
    try {
      if (present()) undo.push(headcount.join(name));
      undo.push(headcount.watch(name, callback));
    } catch (/** @type {any} */ error) {
      refuse(reason(error));
    }
  };
  headcount.addEventListener(
    'error',
    (/** @type {any} */ { detail }) => {
      if (detail.page === name) refuse(detail.message);
    },
    { signal },
  );
  // The next user may see what this one may not.
  const again = () => {
    if (!refused) return;
    unknown();
    name = undefined;
    move();
  };
  headcount.addEventListener('user', again, { signal });
  signal.addEventListener('abort', () => undo.forEach((step) => step()));
  if (page === undefined) follow(move, signal);
  move();
}

/** @type {Set<() => void>} */ const followers = new Set(); // those that live
let following = false;

/** Calls back whenever the page may have another address, or another canonical one. */
function follow(/** @type {() => void} */ callback, /** @type {AbortSignal} */ signal) {
  followers.add(callback);
  signal.addEventListener('abort', () => followers.delete(callback));
  if (following) return;
  following = true;
  const moved = () => followers.forEach((call) => call());
  const { navigation } = /** @type {any} */ (globalThis);
  if (navigation) navigation.addEventListener('currententrychange', moved);
  else {
    addEventListener('popstate', moved);
    for (const name of /** @type {const} */ (['pushState', 'replaceState'])) {
      const original = history[name];
      history[name] = function (...all) {
        original.apply(this, all);
        moved();
      };
    }
  }
  // Some sites change the canonical address only after they have changed the address.
  new MutationObserver(moved).observe(document.head, {
    childList: true,
    subtree: true,
    attributes: true,
    attributeFilter: ['href', 'rel'],
  });
}

// the canonical address, and where it was first seen
/** @type {{href?: string, path?: string, values?: string}} */ let seen = {};

/**
 * The page's own name where that is made of more than a path, or the canonical address has a query, which is kept.
 * @param {string | undefined} from url: path and query; hash: path and fragment; query:p: path and the parameter p
 */
export function place(from) {
  const { pathname, search, hash } = location;
  const here = new URLSearchParams(search);
  const href = /** @type {HTMLLinkElement | null} */ (document.querySelector('link[rel~=canonical][href]'))?.href;
  let name = { pathname, search: from === 'url' ? search : '' };
  try {
    const canonical = href ? new URL(href) : undefined;
    /** The part of the query that the canonical address has, too; of a whole address all of it. */
    const kept = new URLSearchParams(
      [...here].filter(([key]) => from === 'url' || canonical?.searchParams.has(key)),
    ).toString();
    if (href !== seen.href) seen = { href, path: pathname, values: kept };
    // After a script has changed the address, a canonical address that stays is that of another page.
    if (canonical && seen.path === pathname && seen.values === kept) name = canonical;
    else if (kept && seen.path === pathname) name.search = `?${kept}`;
  } catch {} // what the page calls canonical is no address
  let more = name.search;
  if (from === 'hash') more = hash;
  if (from?.startsWith('query:')) {
    const key = from.slice('query:'.length);
    const value = here.get(key);
    more = value === null ? '' : `?${new URLSearchParams({ [key]: value })}`;
  }
  try {
    return decodeURI(name.pathname + more);
  } catch {
    return name.pathname + more;
  }
}

/** A name that is too long as the server takes it: its first 95 characters, a # and the hash of all of it. */
export function fitting(/** @type {string} */ name) {
  const points = [...name];
  return points.length > LONGEST ? points.slice(0, KEPT).join('') + stand(name) : name;
}

/** What stands for a name: a # and half of its SHA-256 in hex. No path has a #. */
const stand = (/** @type {string} */ name) => `#${sha256(name).slice(0, 32)}`;

/** SHA-256 in hex. Browsers have their own only for pages over https. */
export function sha256(/** @type {string} */ text) {
  const bytes = new TextEncoder().encode(text);
  const blocks = new DataView(new ArrayBuffer(((bytes.length + 8) >> 6) * 64 + 64));
  new Uint8Array(blocks.buffer).set(bytes);
  blocks.setUint8(bytes.length, 0x80);
  blocks.setUint32(blocks.byteLength - 4, bytes.length * 8); // a name has far less than 2 ** 32 bits
  // The constants are the first bits behind the point of the roots of the first primes.
  const fraction = (/** @type {number} */ root) => ((root % 1) * 2 ** 32) | 0;
  /** @type {number[]} */ const primes = [];
  for (let n = 2; primes.length < 64; n++) if (primes.every((p) => n % p)) primes.push(n);
  const keys = primes.map((p) => fraction(Math.cbrt(p)));
  const hash = primes.slice(0, 8).map((p) => fraction(Math.sqrt(p)));
  const rotate = (/** @type {number} */ x, /** @type {number} */ by) => (x >>> by) | (x << (32 - by));
  for (let at = 0; at < blocks.byteLength; at += 64) {
    /** @type {number[]} */ const words = [];
    let [a, b, c, d, e, f, g, h] = hash;
    for (let i = 0; i < 64; i++) {
      const [w15, w2] = [words[i - 15], words[i - 2]];
      words[i] =
        i < 16
          ? blocks.getInt32(at + i * 4)
          : (words[i - 16] +
              words[i - 7] +
              (rotate(w15, 7) ^ rotate(w15, 18) ^ (w15 >>> 3)) +
              (rotate(w2, 17) ^ rotate(w2, 19) ^ (w2 >>> 10))) |
            0;
      const one = (h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + keys[i] + words[i]) | 0;
      const two = ((rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [a, b, c, d, e, f, g, h] = [(one + two) | 0, a, b, c, (d + one) | 0, e, f, g];
    }
    [a, b, c, d, e, f, g, h].forEach((value, i) => (hash[i] = (hash[i] + value) | 0));
  }
  return hash.map((word) => (word >>> 0).toString(16).padStart(8, '0')).join('');
}

// ---- what screen readers hear

/** @type {HTMLElement | undefined} */ let region;
/** @type {Map<object, string>} */ const waiting = new Map(); // the newest words of each element that lives
/** @type {any} */ let quiet;

/** Says the words of an element, with those of others that wait: when there was silence for a while, or at once. */
function speak(/** @type {object} */ who, /** @type {string} */ words, atOnce = false) {
  waiting.delete(who);
  if (words) waiting.set(who, words);
  if ((quiet && !atOnce) || !waiting.size) return;
  clearTimeout(quiet);
  const lines = [...waiting.values()].map((each) => {
    const line = document.createElement('p');
    line.textContent = each;
    return line;
  });
  waiting.clear();
  const said = listener();
  said.replaceChildren(...lines);
  quiet = setTimeout(() => {
    said.replaceChildren();
    quiet = 0;
    speak(said, '');
  }, ANNOUNCE_MS);
}

/** The live region of this document. A reader must know it before it says something. */
function listener() {
  if (!region) {
    region = document.createElement('div');
    region.setAttribute('role', 'status'); // polite
    // set by a script, so that strict policies allow it
    region.style.cssText = 'position:fixed;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)';
  }
  if (!region.isConnected) document.body.append(region);
  return region;
}

// ---- the number

const STYLE =
  '[hidden]{display:none!important}' +
  '[part~=count]{font-variant-numeric:tabular-nums}' +
  // Delayed, so that a short change of connection is not seen.
  '[part~=offline],[part~=stale]{opacity:var(--headcount-offline-opacity,.45);transition:opacity .2s .5s}' +
  '[part~=stale]{font-style:italic}' +
  '[part~=refused]{text-decoration:line-through}' +
  ':host(:state(empty)){display:none}';

/** @type {Map<string, CSSStyleSheet>} */ const sheets = new Map();

/**
 * Gives a shadow root a style that it does not have yet. A script makes the sheet, so that
 * strict policies allow it. Safari before 16.4 has no such sheets, and gets an element.
 * @param {ShadowRoot} root
 * @param {string} css
 */
export function dress(root, css) {
  try {
    const sheet = sheets.get(css) ?? new CSSStyleSheet();
    if (!sheets.has(css)) sheet.replaceSync(css);
    sheets.set(css, sheet);
    if (!root.adoptedStyleSheets.includes(sheet)) root.adoptedStyleSheets = [...root.adoptedStyleSheets, sheet];
  } catch {
    if ([...root.querySelectorAll('style')].some(({ textContent }) => textContent === css)) return;
    const style = document.createElement('style');
    style.textContent = css;
    root.append(style);
  }
}

/** @type {MediaQueryList | undefined} */ let small;
/** @type {WeakMap<HTMLElement, ElementInternals>} */ const insides = new WeakMap();

/**
 * Draws an element, or draws it anew.
 * @param {HTMLElement} element
 * @param {Headcount} headcount
 * @param {AbortSignal} signal
 * @param {(value: number | undefined) => void} keep takes the number shown
 * @returns {Parts}
 */
export function draw(element, headcount, signal, keep) {
  const root = element.shadowRoot ?? begin(element);
  const number = /** @type {HTMLElement} */ (root.querySelector('[part~=count]'));
  const slot = document.createElement('slot');
  slot.textContent = element.hasAttribute('other') || element.hasAttribute('min') ? '' : '–';
  /** @type {string | undefined} */ let heard; // the words that a screen reader knows
  const format = (/** @type {number} */ value) => {
    const wanted = element.getAttribute('format');
    const full = wanted === 'full' || (wanted !== 'compact' && element.hasAttribute('other') && !small?.matches);
    return value.toLocaleString(language(element), { notation: full ? undefined : 'compact' });
  };
  const say = (/** @type {string} */ words) => speak(element, words, true);
  let refused = false; // this number, whatever becomes of the others
  const connected = () => {
    const { state } = headcount;
    number.part.toggle('offline', state !== 'open');
    number.part.toggle('refused', refused || state === 'refused');
  };
  const forget = () => {
    refused = false;
    connected();
    keep(undefined);
    number.hidden = false;
    number.part.remove('stale');
    number.replaceChildren(slot);
  };
  headcount.addEventListener('state', connected, { signal });
  signal.addEventListener('abort', () => waiting.delete(element));
  forget();
  listener();
  return {
    element, headcount, root, number, signal, dress, fitting, format, forget, say,
    language: () => language(element),
    refuse(why) {
      forget();
      refused = true;
      connected();
      tell(typeof why === 'string' ? why : reason(why));
    },
    show(value, type, detail, words) {
      const text = format(value);
      keep(value);
      number.part.toggle('stale', !!detail.stale);
      if (detail.stale)
        tell(
          'the server cannot be sure that this count is right (stale): it has just started, or its store or another region does not answer. Its log and /readyz say which one',
          'warn',
        );
      number.textContent = text;
      element.dispatchEvent(new CustomEvent(type, { detail }));
      const wanted = element.getAttribute('announce');
      const now = words === null || wanted === 'off' ? '' : (wanted ?? words).replaceAll('{count}', text);
      const first = heard === undefined; // a screen reader reads the first value in place, like any text
      if (heard === now) return;
      heard = now;
      if (!first) speak(element, now);
    },
  };
}

function begin(/** @type {HTMLElement} */ element) {
  const root = element.attachShadow({ mode: 'open' });
  dress(root, STYLE);
  const number = document.createElement('span');
  number.setAttribute('part', 'count');
  root.append(number);
  const inside = element.attachInternals?.(); // Safari before 16.4 has none
  if (inside) insides.set(element, inside);
  return root;
}

/**
 * The language of an element: the nearest lang around it, also outside of the shadow roots that it is in. None if that
 * is no language tag.
 */
function language(/** @type {HTMLElement} */ element) {
  for (let /** @type {any} */ at = element; at; at = at.getRootNode().host) {
    const found = at.closest('[lang]');
    if (!found) continue;
    try {
      return Intl.getCanonicalLocales(found.lang)[0];
    } catch {
      return;
    }
  }
}

/**
 * <live-count>: the number, or a sentence around it.
 * @param {Parts} parts
 */
export default function count({ element, headcount, root, number, show, format, forget, refuse, signal }) {
  const page = element.getAttribute('page') || undefined;
  const { watch } = /** @type {any} */ (element);
  const least = Number(element.getAttribute('min')) || 0;
  const sentence = element.getAttribute('other');
  const [before, after] = [document.createTextNode(''), document.createTextNode('')];
  root.replaceChildren(before, number, after);
  dress(root, STYLE);

  /** Writes the words around the number; none are for nothing. */
  const write = (/** @type {string} */ words) => {
    const [first, ...rest] = words.split('#');
    before.data = first;
    after.data = rest.join('#');
    number.hidden = !rest.length;
    // So that a site's own border or padding does not stay around nothing.
    try {
      insides.get(element)?.states?.[words ? 'delete' : 'add']('empty');
    } catch {} // Chromium before 125 wants another name
  };
  const words = (/** @type {number} */ value) => {
    if (value < least) return '';
    if (sentence === null) return '#';
    const category = plural(element, value);
    // Some libraries take every attribute that begins with "on" for a listener.
    return (category === 'one' ? element.getAttribute('singular') : null) ?? element.getAttribute(category) ?? sentence;
  };
  /** @type {Counter | undefined} */ let known;
  const paint = (/** @type {Counter | undefined} */ counter, /** @type {string | undefined} */ why = undefined) => {
    known = counter;
    if (!counter) {
      write('#');
      return why ? refuse(why) : forget();
    }
    const text = words(counter.count);
    write(text);
    // Of another page a reader hears nothing without the author's words.
    const spoken = !text ? null : sentence !== null ? text.replace('#', '{count}') : watch ? '' : '{count} here now';
    show(counter.count, 'count', counter, spoken);
  };
  small ??= matchMedia('(max-width: 600px)');
  small.addEventListener('change', () => known && (number.textContent = format(known.count)), { signal });
  signal.addEventListener('abort', headcount.here(paint, { page, watch }));
}

/** The plural category of a number in the element's language. */
const plural = (/** @type {HTMLElement} */ element, /** @type {number} */ value) =>
  new Intl.PluralRules(language(element)).select(value);
