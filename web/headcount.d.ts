/** A page's count, as the server says it. */
export interface Counter {
  page: string;
  /** How many people are there. */
  count: number;
  /** When the count last changed, in UTC; null if nobody was ever there. */
  updated_at: string | null;
  /** "incarnation-sequence": of two counts of a page the one with the greater version holds. */
  version: string;
  /** The server itself cannot be sure at the moment: the last known count. */
  stale?: boolean;
}

/** A counter that lasts, as the server says it. */
export interface CounterValue {
  key: string;
  kind: 'sum' | 'exact' | 'members' | 'unique';
  value: number;
  /** The user is one of its members. */
  mine?: boolean;
  /** When the value last changed, in UTC; null if it never did. */
  updated_at: string | null;
  version: string;
  /** false: an estimate, or a value that may lag. */
  exact: boolean;
  /** The server itself cannot be sure at the moment: the last known value. */
  stale?: boolean;
}

/**
 * A counter that lasts. Its changes need a rule on the server that opens them to
 * everyone; the promise of one that is refused is rejected, with the answer's `status`.
 */
export interface CounterHandle {
  key: string;
  /** The newest value, while something watches the counter. */
  readonly value: number | undefined;
  /** Calls callback now, when the value is known, and on every change; without one it returns an iterator. */
  watch: {
    (callback: (counter: CounterValue) => void): () => void;
    (): AsyncGenerator<CounterValue, void, void>;
  };
  /** Makes the user a member: a like. */
  add: () => Promise<CounterValue>;
  /** The user is no member any more. */
  remove: () => Promise<CounterValue>;
  /** Adds one. */
  increment: () => Promise<CounterValue>;
}

export type State = 'idle' | 'connecting' | 'open' | 'waiting' | 'closed';

/** Who the user is. A function is asked for every connection, so it can fetch a new one. */
export type Token = string | (() => string | Promise<string>);

export interface Options {
  /** Who the user is, when the server wants to know. */
  token?: Token;
  /** false: a tab that has been hidden for a minute is no viewer. Default true. */
  countHidden?: boolean;
  /** false: no other tab uses this connection. Default true: the tabs of a user on a site share one. */
  share?: boolean;
}

/** What went wrong: an error frame of the server, or 'connect'. */
export interface Trouble {
  code: string;
  message: string;
  page?: string;
  /** The key of a counter. */
  counter?: string;
}

export interface HeadcountEvents {
  state: CustomEvent<State>;
  count: CustomEvent<Counter>;
  counter: CustomEvent<CounterValue>;
  unread: CustomEvent<number>;
  error: CustomEvent<Trouble>;
}

/** A connection to a Headcount server, kept up until close(). */
export class Headcount extends EventTarget {
  /** The one connection that all elements of this document share. */
  static get shared(): Headcount;

  /** @param url where the server is; by default where this module came from */
  constructor(url?: string | URL, options?: Options);

  /** idle: nothing was asked for yet; waiting: for the next attempt. */
  get state(): State;
  /** Replaces the token; the next connection uses it. */
  set token(token: Token | undefined);
  get countHidden(): boolean;
  set countHidden(yes: boolean);

  /** Makes the user present on a page. Returns a function that takes this join back. */
  join(page: string): () => void;
  /** Ends presence on a page, however often it was joined; without a page, on all. */
  leave(page?: string): void;
  /**
   * Calls callback with the counter now, when the count is known, and on every
   * change, without being counted; '*' is the whole site. Returns a function
   * that ends it. Without a callback it returns an iterator, of the newest
   * count of each page if the loop is slow.
   */
  watch(pages: string | string[], callback: (counter: Counter) => void): () => void;
  watch(pages: string | string[]): AsyncGenerator<Counter, void, void>;
  /** The same for the number of the user's unread notifications. */
  unread(callback: (count: number) => void): () => void;
  unread(): AsyncGenerator<number, void, void>;
  /** Sets the user's unread notifications to zero. */
  read(): void;
  /** A counter that lasts: views, likes, votes. It is followed while something watches it. */
  counter(key: string): CounterHandle;
  /** Leaves every page and ends the connection for good. */
  close(): void;

  addEventListener<K extends keyof HeadcountEvents>(
    type: K,
    listener: (this: Headcount, event: HeadcountEvents[K]) => unknown,
    options?: boolean | AddEventListenerOptions,
  ): void;
  addEventListener(type: string, listener: EventListenerOrEventListenerObject | null, options?: boolean | AddEventListenerOptions): void;
}

/** <live-count page watch format announce count-hidden>: how many people are on this page. */
export class LiveCount extends HTMLElement {
  /** The number shown, or undefined. */
  get count(): number | undefined;
}

/** <unread-bell label announce>: how many notifications are unread; a click reads them. */
export class UnreadBell extends HTMLElement {
  /** The number shown, or undefined. */
  get count(): number | undefined;
}

/** <live-counter key increment format announce>: the value of a counter. */
export interface LiveCounter extends HTMLElement {
  /** The number shown, or undefined. */
  get count(): number | undefined;
}

/** <like-button key label format announce refused>: how many like something; a click likes it, or no longer. */
export interface LikeButton extends HTMLElement {
  /** The number shown, or undefined. */
  get count(): number | undefined;
}

declare global {
  interface HTMLElementTagNameMap {
    'live-counter': LiveCounter;
    'like-button': LikeButton;
    'live-count': LiveCount;
    'unread-bell': UnreadBell;
  }
}
