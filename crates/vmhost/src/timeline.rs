//! Collects the times of a VM's start and run, and makes one timeline of them.
//!
//! There are two clocks: the node and the VMM use the host's CLOCK_MONOTONIC, init uses the
//! guest's. The mark `PID 1` relates them: the VMM records its host time, and init reports its
//! guest time in the hello.

use crate::text::{short, truncate};
use jiffy_content::clock::monotonic_ns;
use jiffy_wire::agent::GuestSpan;
use jiffy_wire::pager::PagerStats;
use jiffy_wire::timeline::{Counter, Span, Timeline, Track, names};
use jiffy_wire::trace;
use jiffy_wire::vmm::Activity;
use std::collections::BTreeMap;

/// Most spans, and most marks, of a guest: a guest can send any number of them.
const MAX_GUEST: usize = 2048;
/// Most spans, and most counts, of the VMM's threads. A VMM that was taken over sends any number.
const MAX_ACTIVITY: usize = 32_768;
/// Most characters of a span's detail from the VMM, which names a disk, an image or an origin.
const MAX_REMARK: usize = 2000;
/// The VMM's first span: it shows that the VMM runs.
const VMM_MAIN: &str = "VMM main";

/// Times of the first messages on the supervisor channel, for guests that write no marks.
#[derive(Debug, Default, Clone, Copy)]
struct MessageTimes {
    ready: Option<u64>,
    started: Option<u64>,
    ended: Option<u64>,
}

/// Collects the measurements of one start of one VM.
#[derive(Debug, Default, Clone)]
pub struct Recorder {
    clock: String,
    received: Option<u64>,
    waited: Option<(u64, u64)>,
    image_ready: Option<(u64, u64)>,
    spawn: Option<(u64, u64)>,
    standby: Option<(u64, u64)>,
    spare: bool,
    attached: Option<[u64; 5]>,
    vmm: Vec<(String, u64, u64, Option<String>)>,
    activity: Vec<Span>,
    /// Points of each counter, by its thread and name.
    counters: BTreeMap<(String, String), Vec<(u64, u64)>>,
    /// Points of all counters.
    counted: usize,
    marks: Vec<(u8, u64)>,
    guest: Vec<GuestSpan>,
    pid1_guest: Option<u64>,
    heard: MessageTimes,
    kept: Vec<Span>,
    /// The guest did not boot: it was restored.
    restored: bool,
    faults: Option<PagerFaults>,
}

/// The pager's fault statistics of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagerFaults {
    /// Demand faults.
    pub count: u64,
    /// Their total duration, nanoseconds.
    pub total_ns: u64,
    /// Time of the first one, host CLOCK_MONOTONIC.
    pub first_ns: u64,
}

impl From<PagerStats> for PagerFaults {
    fn from(stats: PagerStats) -> PagerFaults {
        PagerFaults {
            count: stats.faults,
            total_ns: stats.fault_ns,
            first_ns: stats.first_fault_ns,
        }
    }
}

impl Recorder {
    /// An empty recorder, for the clock of this boot id.
    pub fn new(clock: &str) -> Recorder {
        Recorder {
            clock: clock.to_owned(),
            ..Recorder::default()
        }
    }

    /// Takes over the measurements of an earlier daemon of the same VM.
    pub fn keep(&mut self, earlier: Timeline) {
        if earlier.clock == self.clock {
            self.kept = earlier.spans;
        }
    }

    /// The guest is restored and does not boot.
    pub fn restored(&mut self) {
        self.restored = true;
    }

    /// Sets the pager's fault statistics.
    pub fn faults(&mut self, faults: PagerFaults) {
        self.faults = Some(faults);
    }

    /// The request to start arrived.
    pub fn received(&mut self, at_ns: u64) {
        self.received = Some(at_ns);
    }

    /// The start waited for memory or vCPUs, from the first to the second of these times.
    pub fn waited(&mut self, waited_ns: (u64, u64)) {
        self.waited = Some(waited_ns);
    }

    /// Image, kernel and disks were looked up.
    pub fn image_ready(&mut self, start_ns: u64, end_ns: u64) {
        self.image_ready = Some((start_ns, end_ns));
    }

    /// `jiffy-vmm` was started; `start_ns` is before, `end_ns` after the call.
    pub fn spawned(&mut self, start_ns: u64, end_ns: u64) {
        self.spawn = Some((start_ns, end_ns));
    }

    /// A spare became the VMM; none was spawned.
    pub fn from_spare(&mut self) {
        self.spare = true;
    }

    /// Times at which the network attachment began, and had its address, its link, its rules and its
    /// name. Parts prepared before the request do not count.
    pub fn attached(&mut self, times_ns: [u64; 5]) {
        let begun = self.received.unwrap_or(0);
        self.attached = Some(times_ns).filter(|[start, ..]| *start >= begun);
    }

    /// A standby got its configuration. Earlier work of its VMM does not count.
    pub fn taken_over(&mut self, start_ns: u64, end_ns: u64) {
        self.standby = Some((start_ns, end_ns));
    }

    /// A span of the VMM.
    pub fn vmm_span(&mut self, name: String, start_ns: u64, end_ns: u64, detail: Option<String>) {
        if self
            .standby
            .is_some_and(|(taken_ns, _)| start_ns < taken_ns)
        {
            return;
        }
        if self.vmm.len() < MAX_GUEST {
            let detail = detail.map(|text| truncate(&text, MAX_REMARK));
            self.vmm.push((short(&name), start_ns, end_ns, detail));
        }
    }

    /// What a thread of the VMM has done.
    pub fn activity(&mut self, activity: Activity) {
        let thread = short(&activity.thread);
        let track = match activity.kernel {
            true => Track::Kernel,
            false => Track::Vmm,
        };
        let names: Vec<String> = activity.names.iter().map(|name| short(name)).collect();
        let named = |index: u32| names.get(index as usize).cloned();
        let room = MAX_ACTIVITY.saturating_sub(self.activity.len());
        for (index, start_ns, length_ns) in activity.spans.into_iter().take(room) {
            let Some(name) = named(index) else { continue };
            let end_ns = start_ns.saturating_add(length_ns);
            let mut span = Span::new(track, name, start_ns, end_ns);
            span.thread = Some(thread.clone());
            self.activity.push(span);
        }
        for (index, at_ns, count) in activity.counts {
            let Some(name) = named(index) else { continue };
            if self.counted == MAX_ACTIVITY {
                break;
            }
            self.counted += 1;
            let points = self.counters.entry((thread.clone(), name)).or_default();
            points.push((at_ns, count));
        }
        if activity.dropped > 0 && self.activity.len() < MAX_ACTIVITY {
            let at_ns = self.activity.last().map_or(0, |last| last.end_ns);
            let mut lost = Span::moment(track, names::ACTIVITY_CUT, at_ns);
            lost.thread = Some(thread);
            self.activity
                .push(lost.with_detail(format!("{} more", activity.dropped)));
        }
    }

    /// A mark on the trace port.
    pub fn mark(&mut self, value: u8, at_ns: u64) {
        if self.marks.len() < MAX_GUEST {
            self.marks.push((value, at_ns));
        }
    }

    /// Spans of init, on the guest's clock.
    pub fn guest_spans(&mut self, spans: Vec<GuestSpan>) {
        let room = MAX_GUEST.saturating_sub(self.guest.len());
        let shortened = spans.into_iter().take(room).map(|span| GuestSpan {
            name: short(&span.name),
            error: span.error.as_deref().map(short),
            ..span
        });
        self.guest.extend(shortened);
    }

    /// Guest time of the mark `PID 1`.
    pub fn pid1_guest(&mut self, guest_ns: u64) {
        self.pid1_guest.get_or_insert(guest_ns);
    }

    /// The agent said that it is ready.
    pub fn note_ready(&mut self) {
        self.heard.ready.get_or_insert_with(monotonic_ns);
    }

    /// Init said that the command runs.
    pub fn note_started(&mut self) {
        self.heard.started.get_or_insert_with(monotonic_ns);
    }

    /// Init said that the command ended.
    pub fn note_ended(&mut self) {
        self.heard.ended.get_or_insert_with(monotonic_ns);
    }

    /// The timeline of what is known so far.
    pub fn build(&self) -> Timeline {
        let mut timeline = Timeline::new(self.clock.clone());
        let spans = &mut timeline.spans;
        self.node_spans(spans);
        for (name, start, end, detail) in &self.vmm {
            if name != VMM_MAIN {
                let mut span = Span::new(Track::Vmm, name.clone(), *start, *end);
                span.detail = detail.clone();
                spans.push(span);
            }
        }
        if self.restored {
            self.restore_spans(spans);
        } else {
            self.boot_spans(spans);
        }
        self.command_spans(spans);
        self.init_spans(spans);
        for (value, at) in &self.marks {
            if !is_named(*value) {
                spans.push(Span::moment(Track::Guest, trace::mark_name(*value), *at));
            }
        }
        let fresh = spans.len();
        for span in &self.kept {
            let is_known = |new: &Span| new.name == span.name;
            if span.thread.is_some() || !spans[..fresh].iter().any(is_known) {
                spans.push(span.clone());
            }
        }
        spans.extend_from_slice(&self.activity);
        let counters = self
            .counters
            .iter()
            .map(|((thread, name), points)| Counter {
                track: Track::Vmm,
                thread: thread.clone(),
                name: name.clone(),
                points: points.clone(),
            });
        timeline.counters = counters.collect();
        timeline.sort();
        timeline
    }

    fn node_spans(&self, spans: &mut Vec<Span>) {
        if let Some(at) = self.received {
            spans.push(Span::moment(Track::Node, names::REQUEST_RECEIVED, at));
        }
        if let Some((start, end)) = self.waited {
            spans.push(Span::new(Track::Node, names::ROOM_WAITED, start, end));
        }
        if let Some((start, end)) = self.image_ready {
            spans.push(Span::new(Track::Node, names::IMAGE_READY, start, end));
        }
        if let Some([start, addressed, linked, ruled, named]) = self.attached {
            let span = |name, start, end| Span::new(Track::Node, name, start, end);
            spans.push(span(names::ADDRESS_TAKEN, start, addressed));
            spans.push(span(names::LINK_MADE, addressed, linked));
            spans.push(span(names::RULES_MADE, linked, ruled));
            spans.push(span(names::NAME_KNOWN, ruled, named));
        }
        if let Some((start, end)) = self.standby {
            spans.push(Span::new(Track::Node, names::STANDBY_TAKEN, start, end));
        }
        if let Some((start, returned)) = self.spawn {
            let main = self.vmm.iter().find(|(name, ..)| name == VMM_MAIN);
            let first = self.vmm.iter().map(|(_, start, ..)| *start).min();
            let end = main.map(|(_, start, ..)| *start).or(first);
            let span = Span::new(
                Track::Node,
                names::VMM_SPAWNED,
                start,
                end.unwrap_or(returned),
            );
            spans.push(match self.spare {
                true => span.with_detail("a spare"),
                false => span,
            });
        }
    }

    /// Spans of the kernel, from the VMM's first entry into the guest to PID 1.
    fn boot_spans(&self, spans: &mut Vec<Span>) {
        let first_run = self
            .vmm
            .iter()
            .find(|(name, ..)| name == names::FIRST_KVM_RUN)
            .map(|(_, _, end, _)| *end);
        let entry = self.first_mark(trace::MARK_KERNEL_ENTRY);
        let pid1 = self.first_mark(trace::MARK_PID1);
        if let Some(at) = entry.or(first_run) {
            spans.push(Span::moment(Track::Kernel, names::KERNEL_ENTRY, at));
            if let Some(pid1) = pid1 {
                spans.push(Span::new(Track::Kernel, names::KERNEL_BOOT, at, pid1));
            }
        }
        if let Some(at) = pid1 {
            spans.push(Span::moment(Track::Init, names::PID1, at));
        }
    }

    /// Spans of the clone gate and of page faults.
    fn restore_spans(&self, spans: &mut Vec<Span>) {
        for (mark, name) in [
            (trace::MARK_GATE_ENTERED, names::GATE_ENTERED),
            (trace::MARK_GATE_PASSED, names::GATE_ACKNOWLEDGED),
        ] {
            if let Some(at) = self.first_mark(mark) {
                spans.push(Span::moment(Track::Init, name, at));
            }
        }
        if let Some(faults) = self.faults.filter(|faults| faults.count > 0) {
            let (first, total) = (faults.first_ns, faults.total_ns);
            spans.push(Span::moment(Track::Node, names::FIRST_FAULT, first));
            let all = Span::new(
                Track::Node,
                names::FAULTS,
                first,
                first.saturating_add(total),
            );
            spans.push(all.with_detail(format!("{} faults", faults.count)));
        }
    }

    fn command_spans(&self, spans: &mut Vec<Span>) {
        let of = |mark, heard: Option<u64>| self.first_mark(mark).or(heard);
        if let Some(at) = of(trace::MARK_AGENT_READY, self.heard.ready) {
            spans.push(Span::moment(Track::Init, names::AGENT_READY, at));
        }
        let started = of(trace::MARK_COMMAND_STARTED, self.heard.started);
        if let Some(at) = started {
            spans.push(Span::moment(Track::Init, names::COMMAND_STARTED, at));
        }
        if let Some(at) = of(trace::MARK_COMMAND_DONE, self.heard.ended) {
            spans.push(Span::moment(Track::Init, names::COMMAND_DONE, at));
            if let Some(started) = started {
                spans.push(Span::new(Track::Guest, names::COMMAND, started, at));
            }
        }
    }

    /// Init's spans on the host's clock; none if the clocks can't be related.
    fn init_spans(&self, spans: &mut Vec<Span>) {
        // A restored guest has no `PID 1` mark; the entry into the gate is used instead.
        let anchor = match self.restored {
            true => trace::MARK_GATE_ENTERED,
            false => trace::MARK_PID1,
        };
        let (Some(host), Some(guest)) = (self.first_mark(anchor), self.pid1_guest) else {
            return;
        };
        let map = |at: u64| {
            let host = i128::from(host) + i128::from(at) - i128::from(guest);
            u64::try_from(host.max(0)).unwrap_or(u64::MAX)
        };
        for span in &self.guest {
            let track = if span.kernel {
                Track::Kernel
            } else {
                Track::Init
            };
            let (start, end) = (map(span.start_ns), map(span.end_ns));
            let mut mapped = Span::new(track, span.name.clone(), start, end);
            mapped.detail = span.error.clone();
            spans.push(mapped);
        }
    }

    fn first_mark(&self, value: u8) -> Option<u64> {
        self.marks
            .iter()
            .find(|(mark, _)| *mark == value)
            .map(|(_, at)| *at)
    }
}

/// Marks for which [`Recorder::build`] makes events of their own.
fn is_named(mark: u8) -> bool {
    matches!(
        mark,
        trace::MARK_KERNEL_ENTRY
            | trace::MARK_PID1
            | trace::MARK_AGENT_READY
            | trace::MARK_COMMAND_STARTED
            | trace::MARK_COMMAND_DONE
            | trace::MARK_GATE_ENTERED
            | trace::MARK_GATE_PASSED
    )
}

#[cfg(test)]
mod tests;
