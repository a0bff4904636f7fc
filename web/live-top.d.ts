import type { LiveTop as LiveTopElement } from './headcount.js';

/** A page and how many people are on it. */
export interface PageUsers {
  page: string;
  users: number;
}

export interface TopOptions {
  /** How many pages, 1 to 100; default 10. */
  n?: number;
  /** Which server; without it: Headcount.defaults. */
  server?: string | URL | undefined;
  storage?: 'none' | undefined;
  /** Sent along, such as an X-API-Key on a page for those who run the site. */
  headers?: Record<string, string>;
  /** What went wrong. refused: the server does not show the list to this user; else another attempt follows. */
  failed?: (error: Error & { status?: number }, refused: boolean) => void;
}

/**
 * Calls back with the pages with the most users, now and at every change, at most once a second,
 * and again after a reconnect. A stale list may be old, or lack pages. A tab that cannot be seen gets nothing.
 * Returns a function that ends it.
 */
export function watchTop(callback: (top: PageUsers[], stale: boolean) => void, options?: TopOptions): () => void;

/** <live-top>: the pages with the most users. */
export const LiveTop: { new (): LiveTopElement; prototype: LiveTopElement };
