//! Decides what to do about the memory that is left.

use jiffy_content::room::memory::Lacking;
use std::time::Duration;

/// How fast VMs can use up memory, MiB per second and processor: the kernel clears each page before
/// a guest gets it.
const GROWTH: u64 = 1024;
/// Time between two checks if VMs can't use up what is left. Other programs can, but then the
/// kernel notifies the node (PSI).
const CALM: Duration = Duration::from_secs(300);
/// Longest time between two checks if VMs can use it up.
const LONGEST: Duration = Duration::from_secs(10);
/// Shortest time between two checks.
const SHORTEST: Duration = Duration::from_millis(100);
/// Time between two checks while memory is low, or requests wait.
const RELIEF: Duration = Duration::from_millis(500);
/// Time between two checks while growing VMs are halted.
const SOON: Duration = Duration::from_millis(200);

/// The host's memory, and the demand for it.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    /// MemAvailable, MiB.
    pub available: u64,
    /// What the first request in the queue lacks.
    pub lacking: Option<Lacking>,
    /// Memory of all running VMs, MiB.
    pub vms: u64,
    /// How many of them may grow, without the first.
    pub others: u64,
    /// MiB by which the first of the growing VMs can still grow.
    pub first: u64,
    /// Processors that VMs can use at the same time.
    pub processors: u64,
    /// Whether VMs are halted.
    pub halted: bool,
}

/// How much memory is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// More than twice the reserve, and no request lacks memory.
    Enough,
    /// Less than twice the reserve: idle guests give up caches.
    Low,
    /// Less than the reserve, or a request waits: idle VMs are hibernated.
    Short,
}

/// What to do with growing VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Halts {
    /// All growing VMs are halted.
    All,
    /// All but the first are halted; the first runs.
    AllButFirst,
    /// One halted VM is resumed, if no other grows.
    ResumeInTurn,
    /// One halted VM is resumed.
    Resume,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relief {
    /// How much is left.
    pub level: Level,
    /// MiB that hibernations should free.
    pub wanted: u64,
    /// Bytes by which each VM but the first may grow before the kernel throttles it; `None`: no
    /// limit.
    pub growth: Option<u64>,
    /// What to do with growing VMs.
    pub halts: Halts,
    /// Time until the next check.
    pub pause: Duration,
}

/// Is so little left (MiB) that growing VMs must be known?
pub fn is_low(reserve: u64, available: u64) -> bool {
    available < reserve.saturating_mul(2)
}

/// What to do with this reserve (MiB).
pub fn decide(reserve: u64, reading: &Reading) -> Relief {
    let Reading { available, .. } = *reading;
    let low = reserve.saturating_mul(2);
    // The rest of the first VM's memory is kept for it; otherwise all would be halted halfway.
    let kept = reserve.saturating_add(reading.first.min(reserve));
    // Half a reserve more, so that the next page does not make memory short again.
    let short = match available < reserve {
        true => reserve.saturating_add(reserve / 2) - available,
        // Halted VMs would use it up.
        false if reading.halted => low.saturating_sub(available),
        false => 0,
    };
    let lacking = match reading.lacking {
        None => 0,
        Some(Lacking::Memory(mib)) => mib.max(1),
        Some(Lacking::Share) => 1,
    };
    let wanted = short.max(lacking);
    let level = match (wanted, is_low(reserve, available)) {
        (1.., _) => Level::Short,
        (0, true) => Level::Low,
        (0, false) => Level::Enough,
    };
    let spare = available.saturating_sub(low);
    let pause = match level {
        Level::Enough if spare >= reading.vms => CALM,
        Level::Enough => {
            let fastest = reading.processors.max(1).saturating_mul(GROWTH);
            let until_low = Duration::from_millis(spare.saturating_mul(1000) / fastest);
            until_low.clamp(SHORTEST, LONGEST)
        }
        _ if available < kept => SOON,
        Level::Low | Level::Short => RELIEF,
    };
    let halts = match available {
        _ if available >= low => Halts::Resume,
        _ if available >= kept => Halts::ResumeInTurn,
        _ if available >= reserve / 4 => Halts::AllButFirst,
        _ => Halts::All,
    };
    Relief {
        level,
        wanted,
        growth: is_low(reserve, available).then(|| {
            available.saturating_sub(kept).saturating_mul(1 << 20) / reading.others.max(1)
        }),
        halts,
        pause,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(available: u64) -> Reading {
        Reading {
            available,
            lacking: None,
            vms: 4096,
            others: 10,
            first: 0,
            processors: 2,
            halted: false,
        }
    }

    #[test]
    fn caches_are_given_up_before_vms_are_hibernated() {
        let levels = [1000, 999, 500, 499, 0].map(|left| decide(500, &reading(left)).level);
        assert_eq!(
            levels,
            [
                Level::Enough,
                Level::Low,
                Level::Low,
                Level::Short,
                Level::Short
            ]
        );
        let wanted = [1000, 500, 499, 0].map(|left| decide(500, &reading(left)).wanted);
        assert_eq!(wanted, [0, 0, 251, 750]);
        let growth = [1000, 990, 500, 249].map(|left| decide(500, &reading(left)).growth);
        assert_eq!(growth, [None, Some(49 << 20), Some(0), Some(0)]);
    }

    #[test]
    fn growing_vms_are_halted_last_and_resumed_when_others_sleep() {
        let halts = [1000, 999, 500, 499, 125, 124].map(|left| decide(500, &reading(left)).halts);
        let (in_turn, but_first) = (Halts::ResumeInTurn, Halts::AllButFirst);
        assert_eq!(
            halts,
            [
                Halts::Resume,
                in_turn,
                in_turn,
                but_first,
                but_first,
                Halts::All
            ]
        );
        let halted = |left| {
            let reading = Reading {
                halted: true,
                ..reading(left)
            };
            decide(500, &reading).wanted
        };
        assert_eq!([1000, 999, 500, 499].map(halted), [0, 1, 500, 251]);
    }

    #[test]
    fn memory_kept_for_the_first_vm_is_at_most_the_reserve() {
        let judged = |first, left| {
            let reading = Reading {
                first,
                ..reading(left)
            };
            let relief = decide(500, &reading);
            (relief.growth, relief.halts, relief.pause)
        };
        let in_turn = Halts::ResumeInTurn;
        let but_first = Halts::AllButFirst;
        assert_eq!(judged(100, 610), (Some(1 << 20), in_turn, RELIEF));
        assert_eq!(judged(100, 600), (Some(0), in_turn, RELIEF));
        assert_eq!(judged(100, 599), (Some(0), but_first, SOON));
        assert_eq!(judged(5000, 1000), (None, Halts::Resume, SHORTEST));
        assert_eq!(judged(5000, 999), (Some(0), but_first, SOON));
    }

    #[test]
    fn a_waiting_request_makes_memory_short_however_much_is_left() {
        let waits = |lacking| {
            let lacking = Some(lacking);
            let reading = Reading {
                lacking,
                ..reading(100_000)
            };
            let relief = decide(500, &reading);
            (relief.level, relief.wanted, relief.growth)
        };
        assert_eq!(waits(Lacking::Memory(128)), (Level::Short, 128, None));
        assert_eq!(waits(Lacking::Memory(0)), (Level::Short, 1, None));
        assert_eq!(waits(Lacking::Share), (Level::Short, 1, None));
    }

    #[test]
    fn the_next_check_comes_before_vms_can_use_up_memory() {
        let pause = |left| decide(500, &reading(left)).pause;
        assert_eq!(
            pause(1000 + 4096),
            CALM,
            "the VMs can't use more than they have"
        );
        assert_eq!(pause(1000 + 2048), Duration::from_secs(1));
        assert_eq!(pause(1001), SHORTEST);
        assert_eq!(pause(999), RELIEF);
        assert_eq!(pause(499), SOON);
        // Nothing overflows.
        let all = Reading {
            available: u64::MAX,
            vms: u64::MAX,
            others: 0,
            first: u64::MAX,
            processors: 0,
            lacking: None,
            halted: false,
        };
        assert_eq!(decide(u64::MAX, &all).level, Level::Enough);
        assert_eq!(decide(u64::MAX, &reading(0)).wanted, u64::MAX);
        assert_eq!(decide(0, &all).level, Level::Enough);
    }
}
