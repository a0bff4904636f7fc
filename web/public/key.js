// The API key, for as long as this tab is open.
import { at } from './at.js';

const NAME = 'headcount_api_key';

let access; // the answer to what needs a key

/** The address may end in #key=…: it is not sent to the server, and gone from the address at once. */
function fromAddress() {
  const given = location.hash.match(/^#key=(.+)$/)?.[1];
  if (!given) return;
  history.replaceState(history.state, '', location.pathname + location.search);
  try {
    key.value = decodeURIComponent(given);
  } catch {} // it is not encoded as an address is
}

export const key = {
  get value() {
    try {
      return sessionStorage.getItem(NAME) ?? '';
    } catch {
      return this.memory ?? '';
    }
  },
  set value(text) {
    this.memory = text;
    try {
      if (text) sessionStorage.setItem(NAME, text);
      else sessionStorage.removeItem(NAME);
    } catch {} // forbidden: it is kept in memory
  },
  /** Whether the dashboard's data, or the list of pages, may be asked for: with a key, or where none is needed. */
  async fits(needed = 'key_needed') {
    if (this.value) return true;
    access ??= fetch(at('-/dashboard/access')).then((answer) => answer.json());
    return access.then((needs) => !needs[needed]).catch(() => (access = undefined)); // to be asked again
  },
  /** Headers of a request that needs the key, if there is one. */
  get headers() {
    return this.value ? { 'X-API-Key': this.value } : {};
  },
};

fromAddress();
addEventListener('hashchange', fromAddress);
