// What somebody who writes TypeScript relies on. test/build.test.js compiles it,
// with `made` being what the compiler finds in headcount.js itself.
import {
  Headcount,
  LiveCount,
  UnreadBell,
  type Counter,
  type CounterHandle,
  type CounterValue,
  type Options,
  type State,
  type Token,
} from '../headcount.js';

import { LiveTop, watchTop, type PageUsers } from '../live-top.js';

import type * as made from 'made';

const token: Token = async () => 't';
const options: Options = { token, countHidden: false, share: false, server: 'https://x.example', storage: 'none' };
const headcount = new Headcount(new URL('https://x.example'), options);
const leave: () => void = headcount.join('p');
const stop: () => void = headcount.watch(['p', '*'], ({ page, count, updated_at, stale }: Counter) => {
  const text: string = page + count.toFixed() + (updated_at?.length ?? 0) + (stale ?? false);
  return text;
});
headcount.unread((count: number) => count.toFixed());
headcount.token = 'other';
headcount.addEventListener('count', ({ detail }) => detail.count.toFixed());
headcount.addEventListener('state', ({ detail }) => detail === 'open');
const state: State = headcount.state;
const likes: CounterHandle = headcount.counter('likes:42');
const unlike: () => void = likes.watch(({ key, value, mine }: CounterValue) => key + value.toFixed() + (mine ?? false));
export const liked: Promise<CounterValue> = likes.add().then(() => likes.remove()).then(() => likes.increment());
headcount.addEventListener('counter', ({ detail }) => detail.value.toFixed());
export const following: Promise<string[]> = headcount
  .follow('p')
  .then(() => headcount.unfollow('p'))
  .then(() => headcount.follows());
headcount.addEventListener('follow', ({ detail: { page, followed } }) => followed && page.toUpperCase());
document.querySelector('follow-button')?.addEventListener('follow', ({ detail }) => detail.page.toUpperCase());
export async function iterate(): Promise<number> {
  for await (const { count } of headcount.watch('p')) return count;
  for await (const count of headcount.unread()) return count;
  for await (const { value } of likes.watch()) return value;
  return Headcount.shared.countHidden ? 1 : 0;
}
const shown: number | undefined =
  document.querySelector('live-count')?.count ??
  document.querySelector('unread-bell')?.count ??
  document.querySelector('live-counter')?.count ??
  document.querySelector('like-button')?.count ??
  likes.value;
Object.assign(document.createElement('live-count'), { page: 'p', singular: '# person' }).watch = false;
const counted: boolean = document.createElement('live-count').countHidden;
const settable = document.createElement('live-counter');
settable.counter = 'views:1';
settable.counter = null;
export const flags: boolean[] = [settable.increment, counted];
document.createElement('live-top').n = 3;
Headcount.defaults = options;
export const others: Headcount[] = [
  new Headcount(options),
  Headcount.at(),
  Headcount.at({ server: '/', storage: 'none' }),
];
export const away: () => void = headcount.here((counter) => counter?.count.toFixed(), { page: 'p', watch: true });
document.querySelector('live-count')?.addEventListener('count', ({ detail }) => detail.count.toFixed());
document.querySelector('live-count')?.addEventListener('click', ({ clientX }) => clientX.toFixed());
document.querySelector('live-counter')?.addEventListener('counter', ({ detail }) => detail.value.toFixed());
document.querySelector('like-button')?.addEventListener('refused', ({ detail }) => detail.status?.toFixed());
document.querySelector('unread-bell')?.addEventListener('unread', ({ detail }) => detail.toFixed());
document.querySelector('unread-bell')?.addEventListener('read', ({ detail }) => detail?.toUpperCase());
document.querySelector('unread-bell')?.addEventListener('open', (event) => event.preventDefault());
document.querySelector('live-top')?.addEventListener('top', ({ detail }) => detail[0]?.page.toUpperCase());
document.querySelector('live-top')?.addEventListener('refused', ({ detail }) => detail.status?.toFixed());
const listed: () => void = watchTop((top: PageUsers[]) => top.map(({ page, users }) => page + users.toFixed()), {
  n: 3,
  headers: {},
  failed: (error, refused) => refused && error.status,
});
export const list: HTMLElement = new LiveTop();
export { listed, leave, stop, state, shown, unlike };

// @ts-expect-error: a page is a string
headcount.join(7);
// @ts-expect-error: there is no such option
new Headcount('https://x.example', { tokens: 't' });

// The declarations promise what is there, and nothing that is not.
type Api<T> = Omit<{ [K in keyof T]: T[K] }, keyof EventTarget>;
declare const real: {
  headcount: Api<made.Headcount>;
  counter: made.Counter;
  lasting: made.CounterValue;
  options: made.Options;
};
declare const written: { headcount: Api<Headcount>; counter: Counter; lasting: CounterValue; options: Options };
export const promised: typeof written = real;
export const complete: typeof real = written;
export const elements: [{ count: number | undefined }, { count: number | undefined }] = [
  new LiveCount(),
  new UnreadBell(),
];
