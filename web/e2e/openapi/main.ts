// Calls a server with the types that openapi-typescript has made of its /-/openapi.json.
import createClient from 'openapi-fetch';

import type { components, paths } from './schema.js';

const [server, key] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: server!, headers: { 'X-API-Key': key! } });

const held = await client.PUT('/-/users/{user}/pages/{page}', {
  params: { path: { user: 'bob', page: 'a/b' } },
  body: {},
});
if (held.error) throw new Error(held.error.title);

const count = await client.GET('/{page}/counter', { params: { path: { page: 'a/b' } } });
if (!count.data) throw new Error('there is no count');
const counted: components['schemas']['Count'] = count.data; // and no text of an HTML page

const added = await client.POST('/api/v1/counters/{key}/increment', {
  params: { path: { key: 'views:2' } },
  body: { delta: 4 },
});
if (!added.data) throw new Error(added.error.title);

const gained = await client.GET('/api/v1/counters/{key}/window', {
  params: { path: { key: 'views:2' }, query: { last: '1h' } },
});
if (!gained.data) throw new Error(gained.error.title);

// @ts-expect-error: last is required
const refused = await client.GET('/api/v1/counters/{key}/window', { params: { path: { key: 'views:2' } } });
if (!refused.error) throw new Error('a window without a length was answered');

const top = await client.GET('/api/v1/top', { params: { query: { match: 'views:*', last: '1h' } } });
console.log(counted.count, added.data.value, gained.data.value, refused.error.status, top.response.status);
