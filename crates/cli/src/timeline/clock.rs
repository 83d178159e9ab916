//! Converts the node's timeline and this process's own spans to one clock.

use crate::client::Client;
use crate::failure::Result;
use jiffy_sys::clock::{boot_id, monotonic_ns};
use jiffy_wire::api::NodeInfo;
use jiffy_wire::timeline::Timeline;

/// How often the other clock is read; the fastest answer counts.
const QUESTIONS: usize = 3;

/// The node's timeline on this host's clock. If the node has another clock (the machine's), that is
/// read over the API, and assumed to have been read in the middle between request and answer.
///
/// # Errors
///
/// If the node does not tell its clock.
pub async fn on_our_clock(client: &Client, mut timeline: Timeline) -> Result<Timeline> {
    let ours = boot_id().unwrap_or_default();
    if timeline.clock == ours {
        return Ok(timeline);
    }
    let mut best: Option<(u64, i64)> = None;
    for _ in 0..QUESTIONS {
        let asked = monotonic_ns();
        let info: NodeInfo = client.get("/v1/info").await?;
        let answered = monotonic_ns();
        let shift = difference(asked, answered, info.now_ns);
        let round_trip = answered.saturating_sub(asked);
        if best.is_none_or(|(shortest, _)| round_trip < shortest) {
            best = Some((round_trip, shift));
        }
    }
    if let Some((_, shift)) = best {
        timeline.shift(shift);
        timeline.clock = ours;
    }
    Ok(timeline)
}

/// What to add to the other clock, which was `theirs` between our `asked` and `answered`.
fn difference(asked: u64, answered: u64, theirs: u64) -> i64 {
    let middle = asked + answered.saturating_sub(asked) / 2;
    let difference = i128::from(middle) - i128::from(theirs);
    difference.clamp(i64::MIN.into(), i64::MAX.into()) as i64
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn clock_offset_assumes_a_reading_midway_through_the_request() {
        assert_eq!(difference(100, 200, 50), 100);
        assert_eq!(difference(100, 200, 1000), -850);
        assert_eq!(difference(0, 10, u64::MAX), i64::MIN);
    }
}
