// How names are made to fit, and what becomes of a page that the server refuses.
import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { mock, test } from 'node:test';

import { attend, fitting, place, sha256 } from '../live.js';

test('the hash is SHA-256', () => {
  let text = '';
  for (let length = 0; length < 300; length++, text += ['x', 'é', '😀', '/'][length % 4])
    assert.equal(sha256(text), createHash('sha256').update(text).digest('hex'), `of ${length} characters`);
});

test('a name over 128 characters becomes its first 95, a # and a hash', () => {
  const longest = '/' + '😀'.repeat(127);
  assert.equal(fitting(longest), longest);
  const name = longest + 'x';
  const made = fitting(name);
  assert.equal([...made].length, 128);
  assert.equal(
    made,
    [...name].slice(0, 95).join('') + '#' + createHash('sha256').update(name).digest('hex').slice(0, 32),
  );
  assert.notEqual(fitting(name + 'y'), made);
});

/** A Headcount that has no server: what is joined and watched, and how the server would refuse. */
function headcount() {
  const joined = [];
  const take = (list, what) => {
    list.push(what);
    return () => list.splice(list.indexOf(what), 1);
  };
  const made = new EventTarget();
  return Object.assign(made, {
    joined,
    join: (page) => {
      if (page === '-') throw new TypeError('Headcount: not a page: -');
      return take(joined, page);
    },
    watch: () => () => {},
    refuse: (page) =>
      made.dispatchEvent(
        new CustomEvent('error', { detail: { code: 'bad_page', message: 'no such character', page } }),
      ),
  });
}

test('a refused page is told once, and its visitor stays on the site', () => {
  const console = mock.method(globalThis.console, 'error', () => {});
  const one = headcount();
  const seen = [];
  const ends = [new AbortController(), new AbortController()];
  for (const { signal } of ends) attend(one, (counter) => seen.push(counter), 'b\u0001d', false, () => '', signal);
  one.refuse('b\u0001d');
  one.refuse('another');
  const stand = `#${createHash('sha256').update('b\u0001d').digest('hex').slice(0, 32)}`;
  assert.deepEqual(one.joined.filter((page) => page !== 'b\u0001d'), [stand, stand]);
  assert.deepEqual(seen, [undefined, undefined]);
  assert.deepEqual(
    console.mock.calls.map(({ arguments: [text] }) => text),
    ['Headcount: the page "b\\u0001d" is not counted: no such character'],
  );
  ends.forEach((end) => end.abort());
  assert.deepEqual(one.joined, []);

  attend(one, () => {}, '-', false, () => '', new AbortController().signal);
  assert.equal(one.joined.length, 1, 'also when it is refused here');
  attend(one, () => {}, '-', true, () => '', new AbortController().signal);
  assert.equal(one.joined.length, 1, 'who watches is nowhere');
  assert.equal(console.mock.calls.length, 2);
  console.mock.restore();
});

test('a callback that fails keeps nobody from following the address', () => {
  const navigation = new EventTarget();
  const errors = [];
  Object.assign(globalThis, {
    navigation,
    document: { head: {} },
    MutationObserver: class {
      observe() {}
    },
    reportError: (error) => errors.push(error.message),
  });
  let path = '/a';
  const [one, two] = [headcount(), headcount()];
  const ends = [new AbortController(), new AbortController()];
  attend(one, () => { throw Error('mine'); }, undefined, false, () => path, ends[0].signal);
  attend(two, () => {}, undefined, false, () => path, ends[1].signal);
  path = '/b';
  navigation.dispatchEvent(new Event('currententrychange'));
  assert.deepEqual([one.joined, two.joined, errors], [['/b'], ['/b'], ['mine']]);
  ends.forEach((end) => end.abort());
  path = '/c';
  navigation.dispatchEvent(new Event('currententrychange'));
  assert.deepEqual([one.joined, two.joined, errors], [[], [], ['mine']]);
});

test('a page is named after what its site says, and the query of a canonical address is kept', () => {
  let canonical;
  globalThis.document = { querySelector: () => canonical && { href: canonical } };
  const at = (address, link) => {
    globalThis.location = new URL(address, 'https://site.example');
    canonical = link && new URL(link, location).href;
    return place;
  };
  assert.equal(at('/?p=123&utm_source=x')('query:p'), '/?p=123');
  assert.equal(at('/?p=caf%C3%A9')('query:p'), '/?p=café');
  assert.equal(at('/?q=1')('query:p'), '/');
  assert.equal(at('/app?x=1#/users/7')('hash'), '/app#/users/7');
  assert.equal(at('/app?x=1#/users/7')('url'), '/app?x=1');
  assert.equal(at('/app?x=1#/users/7')('path'), '/app');
  assert.equal(at('/index.html#/users/7', '/')('hash'), '/#/users/7');
  assert.equal(at('/item?id=5&utm_source=x', '/item?id=5')(), '/item?id=5');
  assert.equal(at('/item?id=5', '/item?id=5')(), '/item?id=5', 'a script has tidied the address up');
  assert.equal(at('/item?id=6', '/item?id=5')(), '/item?id=6', 'a script has changed it, and not the canonical one');
  assert.equal(at('/other', '/item?id=5')(), '/other');
  assert.equal(at('/slug?id=7-name', '/item?id=7')(), '/item?id=7');
  delete globalThis.document;
  delete globalThis.location;
});
