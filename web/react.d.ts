import type { CounterValue, Headcount, State } from './headcount.js';

/** Which server a hook asks. Without it: Headcount.defaults. */
export interface Where {
  server?: string | URL;
  storage?: 'none';
  /** One's own, instead of the one that the elements with this server share. */
  headcount?: Headcount;
}

/**
 * How many people are on a page, the user included; without a page on this one, also when a
 * script changes its address. count is undefined while it is not known, also on a server.
 */
export function useCount(
  page?: string,
  options?: Where & { watch?: boolean },
): { count?: number; stale: boolean; state: State };

/** A counter that lasts, and its changes; the promise of one that is refused is rejected. */
export function useCounter(
  key: string,
  options?: Where,
): {
  value?: number;
  /** The user is one of its members. */
  mine: boolean;
  stale: boolean;
  state: State;
  add: () => Promise<CounterValue>;
  remove: () => Promise<CounterValue>;
  increment: () => Promise<CounterValue>;
};

/**
 * Whether the user follows a page, and the change of it; the promise of one that is refused is rejected. followed is
 * undefined while it is not known.
 */
export function useFollow(
  page: string,
  options?: Where,
): { followed?: boolean; state: State; follow: () => Promise<void>; unfollow: () => Promise<void> };

/** How many notifications of the user are unread; read() makes that zero. */
export function useUnread(options?: Where): { count?: number; state: State; read: () => void };
