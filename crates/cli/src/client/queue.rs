//! Shows the place of a request in the node's queue while it waits for memory and vCPUs.

use super::lines::JsonLines;
use super::{Client, encoded};
use indicatif::{ProgressBar, ProgressStyle};
use jiffy_wire::api::Queued;
use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Duration;
use tokio::time::sleep;

/// The place is shown when a request has had no answer for this long.
const AFTER: Duration = Duration::from_millis(300);
/// How often a request that does not wait in the queue is looked for there again.
const AGAIN: Duration = Duration::from_secs(1);

/// Waits for the answer to a request that has this id; meanwhile shows its place on stderr.
pub(super) async fn answer_or_show_place<T>(
    client: &Client,
    request: &str,
    answer: impl Future<Output = T>,
) -> T {
    let mut answer = pin!(answer);
    tokio::select! {
        biased;
        answer = &mut answer => return answer,
        () = sleep(AFTER) => {}
    }
    tokio::select! {
        biased;
        answer = answer => answer,
        never = show_place(client, request) => match never {},
    }
}

/// A request of its own, which would otherwise contain itself.
type Shows<'a> = Pin<Box<dyn Future<Output = Infallible> + Send + 'a>>;

fn show_place<'a>(client: &Client, request: &'a str) -> Shows<'a> {
    let client = client.with_shows_places(false);
    Box::pin(async move {
        let path = format!("/v1/queue/{}", encoded(request));
        loop {
            if let Ok(places) = client.stream(&path).await {
                let mut places = JsonLines::new(places);
                let line = Line::new();
                while let Ok(Some(queued)) = places.next::<Queued>().await {
                    line.show_place(&queued);
                }
            }
            sleep(AGAIN).await;
        }
    })
}

/// A line on the terminal, which is removed when this is dropped.
struct Line(ProgressBar);

impl Line {
    fn new() -> Line {
        let line = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            line.set_style(style);
        }
        Line(line)
    }

    fn show_place(&self, queued: &Queued) {
        self.0.set_message(format!(
            "jiffy: waiting for memory or vCPUs: place {} in the queue",
            queued.place
        ));
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
