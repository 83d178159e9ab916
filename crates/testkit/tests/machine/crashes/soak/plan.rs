//! Pseudo-random numbers from a seed.

/// A sequence of numbers (xorshift64*).
pub struct Plan(u64);

impl Plan {
    /// The plan of a worker or of the killer.
    pub fn of(seed: u64, whose: u64) -> Plan {
        let mixed = seed ^ (whose + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut plan = Plan(mixed | 1);
        // The first numbers of a seed with few set bits have few set bits.
        for _ in 0..8 {
            plan.below(2);
        }
        plan
    }

    /// The next number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}
