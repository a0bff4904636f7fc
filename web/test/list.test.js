// The list of a bell, on a document of this test in which nothing is drawn.
import assert from 'node:assert/strict';
import { mock, test } from 'node:test';

import { element, settle } from './fake.js';
import toggle from '../list.js';

test('the log-in page of a proxy is not taken for a list, nor for the answer that something was read', async () => {
  globalThis.document = { createElement: element, addEventListener() {} };
  globalThis.CSS = { supports: () => true };
  const said = mock.method(console, 'error', () => {});
  const answers = [new Response('<!doctype html><title>Log in</title>')];
  globalThis.fetch = async () => answers.shift();
  let call;
  const made = [];
  const headcount = {
    unread: () => () => {},
    lend: (given, method, page) => {
      call = given;
      made.push(method);
      return call(method, page, new URL('https://count.example'), 't', true, () => {});
    },
  };
  const root = { querySelector: () => null, append() {}, contains: () => true };
  const node = element();
  node.getAttribute = () => null;
  const { signal } = new AbortController();
  toggle({ element: node, headcount, root, dress() {}, say() {}, language: () => 'en', signal }, element());
  await settle();
  assert.deepEqual(made, ['GET']);
  assert.match(said.mock.calls[0].arguments[0], /no Headcount server.*log-in/);

  answers.push(new Response('<!doctype html><title>Log in</title>'), new Response(null, { status: 204 }));
  await assert.rejects(headcount.lend(call, 'DELETE', 'p'), { name: 'Error', message: /log-in/ });
  await headcount.lend(call, 'DELETE', 'p');
});
