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
  /** What open reservations have taken out of the value. */
  reserved?: number;
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

/**
 * idle: nothing was asked for yet; open: the server has greeted us; waiting: for the next
 * attempt; refused: the server does not let this page in, and the console says why.
 */
export type State = 'idle' | 'connecting' | 'open' | 'waiting' | 'refused' | 'closed';

/** Who the user is. A function is asked for every connection, so it can fetch a new one. */
export type Token = string | (() => string | Promise<string>);

export interface Options {
  /** Where the server is. Default: where headcount.js came from; the npm package has no default. */
  server?: string | URL;
  /** none: neither cookie nor storage; the user has an id as long as this document lives. */
  storage?: 'none';
  /** Who the user is, when the server wants to know. */
  token?: Token;
  /** false: a tab that has been hidden for a minute is no viewer. Default true. */
  countHidden?: boolean;
  /**
   * In `Headcount.defaults` alone: what a page's own name is made of. Default `path`; `query:p` is the path and the
   * parameter p.
   */
  pageFrom?: 'path' | 'url' | 'hash' | `query:${string}`;
  /** false: no other tab uses this connection. Default true: the tabs of a user on a site share one. */
  share?: boolean;
}

/** What went wrong: an error frame of the server, 'connect', or 'refused'. */
export interface Trouble {
  code: string;
  message: string;
  page?: string;
  /** The key of a counter. */
  counter?: string;
}

/** A change of what the user follows, made in this document. */
export interface Follow {
  page: string;
  followed: boolean;
}

export interface HeadcountEvents {
  state: CustomEvent<State>;
  count: CustomEvent<Counter>;
  counter: CustomEvent<CounterValue>;
  unread: CustomEvent<number>;
  follow: CustomEvent<Follow>;
  error: CustomEvent<Trouble>;
}

/** A connection to a Headcount server, kept up until close(). */
export class Headcount extends EventTarget {
  /**
   * What holds where nothing else is said, for elements too. Set it before they connect: in the module that imports
   * this one.
   */
  static defaults: Options;
  /** The one connection that all elements of this document share. */
  static get shared(): Headcount;
  /** The one that elements with this server and storage share. */
  static at(where?: { server?: string | URL; storage?: 'none' }): Headcount;

  /** @param url where the server is, or all options */
  constructor(url?: string | URL | Options, options?: Options);

  get state(): State;
  /** Replaces the token. A new connection uses it: at once if it is another user's. */
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
  /**
   * What a <live-count> does: counts the user on this page, by the path of its canonical
   * address, and goes along when a script changes the address. Calls callback with the
   * counter, and with undefined while it is not known. Returns a function that ends it.
   * @param how page: another name, which stays; watch: without being counted
   */
  here(callback: (counter: Counter | undefined) => void, how?: { page?: string; watch?: boolean }): () => void;
  /** Sets the user's unread notifications to zero. */
  read(): void;
  /**
   * Has the user follow a page: its changes are unread notifications from now on. The
   * promise of a call that is refused is rejected, with the answer's `status`.
   */
  follow(page: string): Promise<void>;
  /** Ends that, and drops what is unread of the page. */
  unfollow(page: string): Promise<void>;
  /** The pages that the user follows. */
  follows(): Promise<string[]>;
  /** A counter that lasts: views, likes, votes. It is followed while something watches it. */
  counter(key: string): CounterHandle;
  /** For the other files of the client: lets them make a call as this user. */
  lend(call: any, method: string, name: string): Promise<any>;
  /** Leaves every page and ends the connection, until open(). */
  close(): void;
  /** Goes on after close(), with all that is wanted: what elements and hooks show, too. */
  open(): void;

  addEventListener<K extends keyof HeadcountEvents>(
    type: K,
    listener: (this: Headcount, event: HeadcountEvents[K]) => unknown,
    options?: boolean | AddEventListenerOptions,
  ): void;
  addEventListener(
    type: string,
    listener: EventListenerOrEventListenerObject | null,
    options?: boolean | AddEventListenerOptions,
  ): void;
}

/** What the elements dispatch. */
export interface LiveCountEvents {
  count: CustomEvent<Counter>;
}
export interface UnreadBellEvents {
  unread: CustomEvent<number>;
  /** What was read: a page, or null for all. */
  read: CustomEvent<string | null>;
  /** The list is about to open, or to close; preventDefault() keeps it from that. */
  open: CustomEvent<null>;
}
export interface LiveCounterEvents {
  counter: CustomEvent<CounterValue>;
}
export interface LikeButtonEvents {
  counter: CustomEvent<CounterValue>;
  /** A click in vain; the error may have the status of the server's answer. */
  refused: CustomEvent<Error & { status?: number }>;
}
export interface FollowButtonEvents {
  follow: CustomEvent<Follow>;
  /** A click in vain; the error may have the status of the server's answer. */
  refused: CustomEvent<Error & { status?: number }>;
}

/** Of <live-top>, which the module live-top.js defines. */
export interface LiveTopEvents {
  /** The pages with the most users. */
  top: CustomEvent<{ page: string; users: number }[]>;
  /** The server does not show the list here. */
  refused: CustomEvent<Error & { status?: number }>;
}

/** An element that dispatches events of its own. */
interface Dispatches<Events> extends HTMLElement {
  addEventListener<K extends keyof Events>(
    type: K,
    listener: (event: Events[K]) => unknown,
    options?: boolean | AddEventListenerOptions,
  ): void;
  addEventListener<K extends keyof HTMLElementEventMap>(
    type: K,
    listener: (this: HTMLElement, event: HTMLElementEventMap[K]) => unknown,
    options?: boolean | AddEventListenerOptions,
  ): void;
  addEventListener(
    type: string,
    listener: EventListenerOrEventListenerObject,
    options?: boolean | AddEventListenerOptions,
  ): void;
}

/** An element that shows a live number. */
interface Live<Events> extends Dispatches<Events> {
  /** The number shown, or undefined. */
  get count(): number | undefined;
}

/**
 * The attributes as properties: under the same names, and those with a dash in camel case, too. A flag is true or
 * false; null and undefined take an attribute away. Libraries and Object.assign set them.
 */
type Properties<Attributes> = { [Name in keyof Attributes]?: Attributes[Name] | null | undefined };

/** <live-count>: how many people are on this page, as a number or as a sentence. */
export interface LiveCount
  extends Live<LiveCountEvents>, Properties<Omit<LiveCountAttributes, 'watch' | 'count-hidden'>> {
  watch: boolean;
  /** false: a user who hides this tab for a minute is not counted. */
  countHidden: boolean;
}
export const LiveCount: { new (): LiveCount; prototype: LiveCount };

/** <unread-bell>: how many notifications are unread; a click opens the list of them. */
export interface UnreadBell extends Live<UnreadBellEvents>, Properties<UnreadBellAttributes> {}
export const UnreadBell: { new (): UnreadBell; prototype: UnreadBell };

/** <live-counter>: the value of a counter. */
export interface LiveCounter extends Live<LiveCounterEvents>, Properties<Omit<LiveCounterAttributes, 'increment'>> {
  increment: boolean;
}

/** <like-button>: how many like something; a click likes it, or no longer. */
export interface LikeButton extends Live<LikeButtonEvents>, Properties<LikeButtonAttributes> {}

/** <follow-button>: whether the user follows a page; a click follows it, or no longer. It shows no number. */
export interface FollowButton extends Live<FollowButtonEvents>, Properties<FollowButtonAttributes> {}

/** <live-top>: the pages with the most users; the module live-top.js defines it. */
export interface LiveTop extends Dispatches<LiveTopEvents>, Properties<LiveTopAttributes> {}

/** For the other files of the client: what their elements are made of, and what defines one. */
export class Shell extends HTMLElement {
  begin(signal: AbortSignal, keep: (value: number | undefined) => void): void;
}
export function define(tag: string, element: unknown, attributes: string[]): void;

type Flag = boolean | '' | 'true' | 'false';

/** The attributes that all elements have. A flag is there, or not; the text `false` is read as false. */
interface CommonAttributes {
  /** Where the server is. */
  server?: string;
  storage?: 'none';
  /** full: 1,234 instead of 1.2K. */
  format?: 'full' | 'compact';
  /** What a screen reader says, at most once a minute; {count} is the number, and off is silence. */
  announce?: string;
}
export interface LiveCountAttributes extends CommonAttributes {
  page?: string;
  watch?: Flag;
  /** false: a user who hides this tab for a minute is not counted. */
  'count-hidden'?: Flag;
  /** Nothing is shown under it. */
  min?: number | string;
  /** The sentence, with # for the number, by the plural of the page's language; other is needed. */
  zero?: string;
  singular?: string;
  /** What singular was called; many libraries take it for a listener. */
  one?: string;
  two?: string;
  few?: string;
  many?: string;
  other?: string;
}
export interface UnreadBellAttributes extends CommonAttributes {
  label?: string;
  /** What the button says that reads all. */
  all?: string;
  /** What an empty list says. */
  none?: string;
  /** What is said when the list cannot be loaded. */
  failed?: string;
}
export interface LiveCounterAttributes extends CommonAttributes {
  increment?: Flag;
  /** The key of the counter. In plain HTML it may be called `key`, which many libraries keep for themselves. */
  counter?: string;
}
export interface LikeButtonAttributes extends CommonAttributes {
  counter?: string;
  label?: string;
  refused?: string;
}
export interface FollowButtonAttributes extends Omit<CommonAttributes, 'format' | 'announce'> {
  page: string;
  label?: string;
  refused?: string;
}
export interface LiveTopAttributes extends Omit<CommonAttributes, 'format' | 'announce'> {
  /** How many pages, 1 to 100; default 10. */
  n?: number | string;
  label?: string;
  /** What stands there when the server does not show the list. */
  refused?: string;
}

/** What every element takes in the JSX of a library. */
interface Anywhere {
  class?: string | undefined;
  id?: string | undefined;
  style?: any;
  ref?: any;
  slot?: string | undefined;
  lang?: string | undefined;
  title?: string | undefined;
  hidden?: boolean | undefined;
  children?: any;
  /** Such as Solid's on:count and prop:page. */
  [directive: `${string}:${string}`]: unknown;
}

/** What elements take, for the JSX of any library. That of React knows it already. */
export interface HeadcountElements {
  'live-count': LiveCountAttributes & Listeners<LiveCountEvents> & Anywhere;
  'unread-bell': UnreadBellAttributes & Listeners<UnreadBellEvents> & Anywhere;
  'live-counter': LiveCounterAttributes & Listeners<LiveCounterEvents> & Anywhere;
  'like-button': LikeButtonAttributes & Listeners<LikeButtonEvents> & Anywhere;
  'follow-button': FollowButtonAttributes & Listeners<FollowButtonEvents> & Anywhere;
  'live-top': LiveTopAttributes & Listeners<LiveTopEvents> & Anywhere;
}

declare global {
  interface HTMLElementTagNameMap {
    'live-counter': LiveCounter;
    'like-button': LikeButton;
    'follow-button': FollowButton;
    'live-top': LiveTop;
    'live-count': LiveCount;
    'unread-bell': UnreadBell;
  }
}

/** What React 19 and Preact call the listener of an event. */
type Listeners<Events> = { [K in keyof Events & string as `on${K}`]?: (event: Events[K]) => void };

// @ts-ignore: without React there is nothing to add to
declare module 'react' {
  namespace JSX {
    interface IntrinsicElements {
      // @ts-ignore
      'live-count': DetailedHTMLProps<HTMLAttributes<LiveCount>, LiveCount> &
        LiveCountAttributes &
        Listeners<LiveCountEvents> & { class?: string };
      // @ts-ignore
      'unread-bell': DetailedHTMLProps<HTMLAttributes<UnreadBell>, UnreadBell> &
        UnreadBellAttributes &
        Listeners<UnreadBellEvents> & { class?: string };
      // @ts-ignore
      'live-counter': DetailedHTMLProps<HTMLAttributes<LiveCounter>, LiveCounter> &
        LiveCounterAttributes &
        Listeners<LiveCounterEvents> & { class?: string };
      // @ts-ignore
      'like-button': DetailedHTMLProps<HTMLAttributes<LikeButton>, LikeButton> &
        LikeButtonAttributes &
        Listeners<LikeButtonEvents> & { class?: string };
      // @ts-ignore
      'follow-button': DetailedHTMLProps<HTMLAttributes<FollowButton>, FollowButton> &
        FollowButtonAttributes &
        Listeners<FollowButtonEvents> & { class?: string };
      // @ts-ignore
      'live-top': DetailedHTMLProps<HTMLAttributes<LiveTop>, LiveTop> &
        LiveTopAttributes &
        Listeners<LiveTopEvents> & { class?: string };
    }
  }
}
