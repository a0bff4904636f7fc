// A widget's title, and the number of a widget that only reads: see getWidget in gateway/api/widget.go.
const AGAIN_MS = 10_000; // until the next attempt, after a refusal; others are made by the browser

const number = document.querySelector('[data-events]');
const entitle = (count) => (document.title = document.title.replace(/^\d+/, count));

function listen() {
  const stream = new EventSource(number.dataset.events);
  stream.addEventListener('count', ({ data }) => {
    const { count } = JSON.parse(data);
    number.textContent = count.toLocaleString(undefined, { notation: 'compact' });
    entitle(count);
  });
  stream.addEventListener('error', () => stream.readyState === EventSource.CLOSED && setTimeout(listen, AGAIN_MS));
}

if (number) listen();
else document.querySelector('live-count').addEventListener('count', ({ detail }) => entitle(detail.count));
