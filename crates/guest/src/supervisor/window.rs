//! Output of the first command that the host has not confirmed yet.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use jiffy_wire::agent::MAIN_OUTPUT_WINDOW;

/// Most bytes that were sent but not confirmed, while the host is connected. Larger than all
/// buffers between guest and host: a confirmation may be queued behind that much input, which the
/// program can't read before it can write.
pub const UNCONFIRMED_LIMIT: usize = 1024 * 1024;

/// The end of an output stream, from the first unconfirmed byte on.
#[derive(Debug, Default)]
pub struct OutputWindow {
    /// Offset of the first byte that is kept.
    base: u64,
    /// Offset of the first byte that was not sent on this connection.
    sent: u64,
    bytes: VecDeque<u8>,
}

impl OutputWindow {
    /// Offset of the end of the program's output.
    pub fn end(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    /// Offset of the end of the output that was sent on this connection.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Number of bytes that may be read from the program now.
    pub fn room(&self) -> usize {
        let unsent = (self.end() - self.sent) as usize;
        MAIN_OUTPUT_WINDOW
            .saturating_sub(unsent)
            .min(UNCONFIRMED_LIMIT.saturating_sub(self.bytes.len()))
    }

    /// Appends output of the program.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// Drops output before `offset`, which the host has stored. Ignores offsets that were not sent.
    pub fn confirm(&mut self, offset: u64) {
        if offset > self.base && offset <= self.sent {
            self.bytes.drain(..(offset - self.base) as usize);
            self.base = offset;
        }
    }

    /// Handles a new connection; the host has everything before `offset`. The rest is sent again.
    pub fn resume(&mut self, offset: u64) {
        if offset > self.base && offset <= self.end() {
            self.sent = self.sent.max(offset);
            self.confirm(offset);
        }
        self.sent = self.base;
    }

    /// Handles the loss of the connection: sent output may have to be sent again.
    pub fn disconnected(&mut self) {
        self.sent = self.base;
    }

    /// Takes the next bytes to send, at most `limit`, with their offset.
    pub fn take(&mut self, limit: usize) -> Option<(u64, Vec<u8>)> {
        let start = (self.sent - self.base) as usize;
        let count = (self.bytes.len() - start).min(limit);
        if count == 0 {
            return None;
        }
        let offset = self.sent;
        self.sent += count as u64;
        Some((
            offset,
            self.bytes.range(start..start + count).copied().collect(),
        ))
    }

    /// Whether the host has confirmed everything.
    pub fn is_confirmed(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Whether all output was sent on this connection.
    pub fn all_sent(&self) -> bool {
        self.sent == self.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn backpressure_begins_when_the_output_window_is_full() {
        let mut window = OutputWindow::default();
        assert_eq!(window.room(), MAIN_OUTPUT_WINDOW);
        window.push(&[0; MAIN_OUTPUT_WINDOW]);
        assert_eq!(window.room(), 0);
        let (offset, bytes) = window.take(usize::MAX).unwrap();
        assert_eq!((offset, bytes.len()), (0, MAIN_OUTPUT_WINDOW));
        assert_eq!(window.room(), MAIN_OUTPUT_WINDOW);
        window.disconnected();
        assert_eq!(window.room(), 0, "what was sent may be needed again");
    }

    #[test]
    fn unconfirmed_output_is_bounded() {
        let mut window = OutputWindow::default();
        loop {
            let room = window.room();
            if room == 0 {
                break;
            }
            window.push(&std::vec![0; room]);
            while window.take(1000).is_some() {}
        }
        assert_eq!(window.end(), UNCONFIRMED_LIMIT as u64);
    }

    #[test]
    fn offsets_that_were_never_sent_confirm_nothing() {
        let mut window = OutputWindow::default();
        window.push(b"abc");
        window.confirm(2);
        window.confirm(u64::MAX);
        assert_eq!(window.take(9), Some((0, b"abc".to_vec())));
        window.resume(u64::MAX);
        assert_eq!(window.take(9), Some((0, b"abc".to_vec())));
    }

    #[derive(Debug, Clone)]
    enum Act {
        Write(u8),
        Send(usize),
        Confirm,
        Break(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            any::<u8>().prop_map(Act::Write),
            (1usize..50).prop_map(Act::Send),
            Just(Act::Confirm),
            any::<usize>().prop_map(Act::Break),
        ]
    }

    proptest! {
        /// A host that stores output at its offsets ends with exactly the program's output, however
        /// connections break.
        #[test]
        fn the_host_stores_every_byte_once_across_reconnects(acts in proptest::collection::vec(act(), 0..200)) {
            let mut window = OutputWindow::default();
            let (mut written, mut stored) = (Vec::new(), Vec::new());
            let store = |stored: &mut Vec<u8>, (offset, bytes): (u64, Vec<u8>)| {
                assert!(offset as usize <= stored.len(), "a gap");
                stored.truncate(offset as usize);
                stored.extend(bytes);
            };
            for act in acts {
                match act {
                    Act::Write(count) => {
                        let bytes: Vec<u8> = (0..count).map(|n| n ^ written.len() as u8).collect();
                        window.push(&bytes);
                        written.extend(bytes);
                    }
                    Act::Send(limit) => {
                        if let Some(chunk) = window.take(limit) {
                            store(&mut stored, chunk);
                        }
                    }
                    Act::Confirm => window.confirm(stored.len() as u64),
                    Act::Break(kept) => {
                        window.disconnected();
                        // Bytes in flight are lost: the host keeps the confirmed bytes and some of
                        // the rest.
                        let confirmed = window.base as usize;
                        let kept = confirmed + kept % (stored.len() - confirmed + 1);
                        stored.truncate(kept);
                        window.resume(stored.len() as u64);
                    }
                }
            }
            while let Some(chunk) = window.take(7) {
                store(&mut stored, chunk);
            }
            prop_assert_eq!(stored, written);
        }
    }
}
