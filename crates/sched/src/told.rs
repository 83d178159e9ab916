//! Values of the policy's map `told`, as `struct told` in `bpf/policy.bpf.c` has them.

use jiffy_wire::sched::{Class, SetClass};

/// Makes the values.
#[derive(Debug)]
pub struct Entries {
    /// CPU time of a launch, nanoseconds; what takes longer is steady.
    budget_ns: u64,
    /// Launches so far.
    launches: u64,
}

impl Entries {
    /// No launch yet; each may take this CPU time.
    pub fn new(budget_ns: u64) -> Entries {
        Entries {
            budget_ns,
            launches: 0,
        }
    }

    /// The key and the value for a process. Launches are numbered in the order of these calls.
    pub fn entry(&mut self, set: SetClass) -> ([u8; 4], [u8; 24]) {
        let launches = set.class == Class::Launch;
        self.launches += u64::from(launches);
        let (sequence, budget) = match launches {
            true => (self.launches, self.budget_ns),
            false => (0, 0),
        };
        let mut value = [0; 24];
        value[..8].copy_from_slice(&sequence.to_ne_bytes());
        value[8..16].copy_from_slice(&budget.to_ne_bytes());
        value[16..20].copy_from_slice(&number(set.class).to_ne_bytes());
        (set.pid.to_ne_bytes(), value)
    }
}

/// Its number in `enum class`.
fn number(class: Class) -> u32 {
    match class {
        Class::Urgent => 0,
        Class::Launch => 1,
        Class::Steady => 2,
        Class::Background => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(value: [u8; 24]) -> (u64, u64, u32) {
        let long = |at: usize| u64::from_ne_bytes(value[at..at + 8].try_into().unwrap());
        let class = u32::from_ne_bytes(value[16..20].try_into().unwrap());
        (long(0), long(8), class)
    }

    #[test]
    fn launches_are_numbered_in_order_and_have_a_budget() {
        let mut entries = Entries::new(500);
        let mut told = |pid, class| {
            let (key, value) = entries.entry(SetClass { pid, class });
            assert_eq!(key, u32::to_ne_bytes(pid));
            words(value)
        };
        assert_eq!(told(9, Class::Launch), (1, 500, 1));
        assert_eq!(told(5, Class::Urgent), (0, 0, 0));
        assert_eq!(told(7, Class::Launch), (2, 500, 1));
        assert_eq!(told(9, Class::Steady), (0, 0, 2));
        assert_eq!(told(9, Class::Background), (0, 0, 3));
    }

    #[test]
    fn classes_have_the_numbers_of_the_policy() {
        let source = include_str!("../bpf/policy.bpf.c");
        assert!(source.contains("enum class { URGENT, LAUNCH, STEADY, BACKGROUND, CLASSES };"));
    }
}
