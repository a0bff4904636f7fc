// @ts-check
// Who the user is: the token, or the anonymous id that a server issued.

const ANSWER_MS = 10_000; // how long a token or a file may take

/** @typedef {string | (() => string | Promise<string>)} Token */

/** Fails when there is no answer: a network that loses requests without a word says nothing for minutes. @type {<T>(answer: T) => Promise<Awaited<T>>} */
export const timely = (answer) =>
  Promise.race([answer, new Promise((_, fail) => setTimeout(fail, ANSWER_MS, 'timeout'))]);

/** Asks for a token. What a function throws is a failed answer, too. */
export const ask = async (/** @type {Token | undefined} */ token) =>
  timely(typeof token === 'function' ? token() : token);

/** Whose a token is: '' of nobody, and undefined if it does not say that. @type {(token: string | undefined) => string | undefined} */
export const userOf = (token) => {
  try {
    return !token ? '' : JSON.parse(atob(token.split('.')[1].replace(/-/g, '+').replace(/_/g, '/'))).sub;
  } catch {}
};

/**
 * What a seed begins with. It takes the place of the user's id until the server has issued one, so that all
 * calls of a first visit are those of one user.
 */
export const SEED = '0000000000000000000000.';
const seed = () =>
  SEED + [...crypto.getRandomValues(new Uint8Array(22))].map((byte) => (byte % 36).toString(36)).join('');

/** The shape of ids and seeds: anything else in the storage is another script's, and no server knows it. */
const ID = /^[\w-]{22}\.[\w-]{22}$/;

/** @type {Record<string, string>} */ const memory = {}; // ids and seeds, by whether they may be stored and where

/**
 * The anonymous id that a server issued, or a seed; with an id, keeps it. On the server's own
 * origin a cookie says who we are, and this returns nothing, unless the browser keeps no cookies: the page is in
 * a frame of another site, or the user forbids them.
 * @param {URL} base of the server: others may be on other paths of its origin
 * @param {boolean} keep whether it may be stored
 * @param {any} [id]
 */
export function idOf({ origin, pathname }, keep, id) {
  const old = `headcount_id ${origin}`; // once of all servers there
  const key = old + pathname.slice(0, -1);
  const own = keep + key;
  const fresh = () => memory[`false${key}`] ?? seed(); // who consents to storage stays who they were
  const issued = ID.test(id);
  if (issued) memory[own] = id;
  try {
    if (keep && location.origin === origin) {
      const kept = () => document.cookie.includes('headcount_new');
      // Another tab may write one at the same time. Each has its own name, so both are kept, and the first one counts.
      if (!kept()) document.cookie = `headcount_new_${seed().slice(-8)}=${fresh()};path=/;max-age=60;samesite=lax`;
      if (kept()) return;
    }
  } catch {}
  try {
    if (issued && keep) localStorage[key] = id;
    if (keep) {
      // What this document has presented counts more than another tab's seed.
      const stored = [localStorage[key], localStorage[old]].find((one) => ID.test(one));
      if (stored && !(memory[own] && stored.startsWith(SEED))) memory[own] = stored;
      return (localStorage[key] = memory[own] ??= fresh());
    }
  } catch {}
  return (memory[own] ??= fresh());
}
