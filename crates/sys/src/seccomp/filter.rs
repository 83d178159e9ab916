//! BPF programs, compiled from lists of system calls.
//!
//! Source: Linux `Documentation/userspace-api/seccomp_filter.rst`.

use libc::sock_filter;

/// A system call that a thread may make.
#[derive(Clone, Copy)]
pub struct Rule {
    number: u32,
    argument: u8,
    check: Check,
}

#[derive(Clone, Copy)]
enum Check {
    Any,
    /// The argument's low 32 bits are one of these values.
    OneOf(&'static [u32]),
    /// None of these bits is set in the argument's low 32 bits.
    NoneOf(u32),
}

impl Rule {
    /// The word of the call's number, and its bit in that word.
    const fn place(&self) -> (usize, u32) {
        (self.number as usize / 32, 1 << (self.number % 32))
    }
}

/// Allows the call with any arguments.
pub const fn call(number: libc::c_long) -> Rule {
    Rule {
        number: number as u32,
        argument: 0,
        check: Check::Any,
    }
}

/// Allows the call if this argument (counted from 0) has one of these values.
pub const fn call_with(number: libc::c_long, argument: u8, values: &'static [u32]) -> Rule {
    Rule {
        number: number as u32,
        argument,
        check: Check::OneOf(values),
    }
}

/// Allows the call if this argument (counted from 0) has none of these bits.
pub const fn call_without(number: libc::c_long, argument: u8, bits: u32) -> Rule {
    Rule {
        number: number as u32,
        argument,
        check: Check::NoneOf(bits),
    }
}

/// What happens at a call that no rule allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The thread gets SIGSYS, so that a handler can report the call.
    Signal,
    /// The call fails with `ENOSYS`, as if the kernel did not know it: programs continue
    /// without a newer call.
    Error,
}

impl Refusal {
    const fn verdict(self) -> u32 {
        match self {
            Refusal::Signal => libc::SECCOMP_RET_TRAP,
            Refusal::Error => libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
        }
    }
}

/// Most instructions of a program: jumps reach no farther.
pub const CAPACITY: usize = 256;

/// Words of 32 calls each: up to number 479.
const WORDS: usize = 15;
const MAX_COMPARED: usize = 40;
/// A word with at most this many calls is cheaper to compare call by call.
const COMPARE_THRESHOLD: u32 = 2;

/// A BPF program.
pub struct Filter {
    code: [sock_filter; CAPACITY],
    length: usize,
}

// `struct seccomp_data`: number, architecture, instruction pointer, arguments.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
/// EM_X86_64, 64 bits, little endian.
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;

const LOAD: u16 = 0x20;
const LOAD_NUMBER: u16 = 0x00;
const LOAD_X: u16 = 0x01;
const TO_X: u16 = 0x07;
const AND: u16 = 0x54;
const SHIFT_BY_X: u16 = 0x7c;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER_OR_EQUAL: u16 = 0x35;
const JUMP_SET: u16 = 0x45;
const JUMP_CLASS: u16 = 0x05;
const RETURN: u16 = 0x06;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;

/// A jump to the answer that allows; its distance is not known yet.
const TO_ALLOW: u8 = 254;
const TO_REFUSE: u8 = 255;
/// A jump to the calls that are compared one by one.
const TO_COMPARISONS: u8 = 253;
/// A jump to the test of a bit.
const TO_BIT: u32 = u32::MAX;

impl Filter {
    /// Builds the program; the order of rules does not matter. Fails to compile if two rules are
    /// for one call or the program is too long.
    ///
    /// The kernel translates a program whenever a thread installs it, at a cost of some thousand
    /// instructions for each of the program's own. So calls are looked up as bits of a few words,
    /// and calls that are nearly alone in their word are compared one by one. The kernel would also
    /// try every system call in advance, to remember those that always pass, at ten times the cost
    /// of what a VM's few calls could save; a program that uses X at its start prevents that.
    /// Measured again in November 2026 against a binary search that the kernel can try: a restore
    /// took 2.19 M instructions instead of 2.03; a run from a golden snapshot and an exec, whose
    /// calls would gain, cost the same within noise.
    pub const fn build(lists: &[&[Rule]], refusal: Refusal) -> Filter {
        let mut listed = [0_u32; WORDS];
        let mut list = 0;
        while list < lists.len() {
            let mut i = 0;
            while i < lists[list].len() {
                let (word, bit) = lists[list][i].place();
                assert!(word < WORDS, "a call beyond the table");
                assert!(listed[word] & bit == 0, "two rules for one call");
                listed[word] |= bit;
                i += 1;
            }
            list += 1;
        }
        let mut words = [0; WORDS];
        let mut compared = [call(0); MAX_COMPARED];
        let mut comparisons = 0;
        list = 0;
        while list < lists.len() {
            let mut i = 0;
            while i < lists[list].len() {
                let rule = lists[list][i];
                let (word, bit) = rule.place();
                if listed[word].count_ones() > COMPARE_THRESHOLD && matches!(rule.check, Check::Any)
                {
                    words[word] |= bit;
                } else {
                    compared[comparisons] = rule;
                    comparisons += 1;
                }
                i += 1;
            }
            list += 1;
        }
        let mut filter = Filter {
            code: [instruction(RETURN, 0, 0, KILL); CAPACITY],
            length: 0,
        };
        filter.push(instruction(LOAD_X, 0, 0, 0));
        filter.push(instruction(LOAD, 0, 0, ARCHITECTURE));
        filter.push(instruction(JUMP_EQUAL, 1, 0, AUDIT_ARCH_X86_64));
        filter.push(instruction(RETURN, 0, 0, KILL));
        filter.push(instruction(LOAD, 0, 0, NUMBER));
        filter.push(instruction(AND, 0, 0, 31));
        filter.push(instruction(TO_X, 0, 0, 0));
        filter.push(instruction(LOAD, 0, 0, NUMBER));
        filter.find_word(&words);
        filter.look_at_bit();
        let mut i = 0;
        while i < comparisons {
            filter.compare(&compared[i]);
            i += 1;
        }
        filter.push(instruction(JUMP, 0, 0, 1));
        filter.answer(TO_ALLOW, ALLOW);
        filter.answer(TO_REFUSE, refusal.verdict());
        filter
    }

    /// The instructions.
    pub const fn as_slice(&self) -> &[sock_filter] {
        self.code.split_at(self.length).0
    }

    /// Loads the word of the call's number into the accumulator, and jumps to the test of its bit,
    /// or past it if the word has no bits.
    const fn find_word(&mut self, words: &[u32; WORDS]) {
        let mut from = 0;
        while from < WORDS {
            let word = words[from];
            let mut to = from + 1;
            while word == 0 && to < WORDS && words[to] == 0 {
                to += 1;
            }
            let beyond = 32 * to as u32;
            if word != 0 {
                self.push(instruction(JUMP_GREATER_OR_EQUAL, 2, 0, beyond));
                self.push(instruction(LOAD_NUMBER, 0, 0, word));
                // The target is not known yet.
                self.push(instruction(JUMP, 0, 0, TO_BIT));
            } else if to < WORDS {
                self.push(instruction(
                    JUMP_GREATER_OR_EQUAL,
                    0,
                    TO_COMPARISONS,
                    beyond,
                ));
            }
            from = to;
        }
    }

    /// Tests the number's bit; every word's jump arrives here.
    const fn look_at_bit(&mut self) {
        // A number without a word has no bit: jumps past the test.
        self.push(instruction(JUMP, 0, 0, 2));
        let at = self.length;
        let mut i = 0;
        while i < at {
            let jump = &mut self.code[i];
            if jump.code == JUMP && jump.k == TO_BIT {
                jump.k = (at - i - 1) as u32;
            }
            i += 1;
        }
        self.push(instruction(SHIFT_BY_X, 0, 0, 0));
        self.push(instruction(JUMP_SET, TO_ALLOW, 0, 1));
        let rest = self.push(instruction(LOAD, 0, 0, NUMBER));
        self.point(TO_COMPARISONS, rest);
    }

    /// Compares with one call, and with its argument if the rule has one; for another call
    /// continues after it.
    const fn compare(&mut self, rule: &Rule) {
        let load = instruction(LOAD, 0, 0, ARGUMENTS + 8 * rule.argument as u32);
        let call = self.push(instruction(JUMP_EQUAL, 0, 0, rule.number));
        match rule.check {
            Check::Any => self.code[call].jt = TO_ALLOW,
            Check::NoneOf(bits) => {
                self.push(load);
                self.push(instruction(JUMP_SET, TO_REFUSE, TO_ALLOW, bits));
            }
            Check::OneOf(values) => {
                self.push(load);
                let mut i = 0;
                while i < values.len() {
                    let otherwise = if i + 1 == values.len() { TO_REFUSE } else { 0 };
                    self.push(instruction(JUMP_EQUAL, TO_ALLOW, otherwise, values[i]));
                    i += 1;
                }
            }
        }
        self.code[call].jf = short(self.length - call - 1);
    }

    /// Appends an answer and resolves the jumps to it.
    const fn answer(&mut self, wanted: u8, verdict: u32) {
        let at = self.push(instruction(RETURN, 0, 0, verdict));
        self.point(wanted, at);
    }

    /// Resolves the jumps to this instruction.
    const fn point(&mut self, wanted: u8, at: usize) {
        let mut i = 0;
        while i < at {
            let distance = at - i - 1;
            let jump = &mut self.code[i];
            if jump.code & 0x07 == JUMP_CLASS && jump.code != JUMP {
                if jump.jt == wanted {
                    jump.jt = short(distance);
                }
                if jump.jf == wanted {
                    jump.jf = short(distance);
                }
            }
            i += 1;
        }
    }

    const fn push(&mut self, instruction: sock_filter) -> usize {
        let at = self.length;
        self.code[at] = instruction;
        self.length += 1;
        at
    }
}

/// Checks that a conditional jump can have this distance.
const fn short(distance: usize) -> u8 {
    assert!(
        distance < TO_COMPARISONS as usize,
        "too many rules for a short jump"
    );
    distance as u8
}

const fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    static FILTER: Filter = Filter::build(
        &[
            &[
                call(libc::SYS_write),
                call(libc::SYS_close),
                call(libc::SYS_fstat),
                call(libc::SYS_open),
                call(libc::SYS_epoll_ctl),
                call_with(libc::SYS_ioctl, 1, &[7, 9]),
                call_without(libc::SYS_mmap, 2, 4),
            ],
            &[call(libc::SYS_read), call(libc::SYS_exit_group)],
        ],
        Refusal::Signal,
    );

    const REFUSE: u32 = Refusal::Signal.verdict();

    /// Interprets the instructions that programs use.
    fn verdict(filter: &Filter, number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(AUDIT_ARCH_X86_64.to_le_bytes());
        data.extend([0; 8]);
        arguments
            .iter()
            .for_each(|argument| data.extend(argument.to_le_bytes()));
        let code = filter.as_slice();
        let (mut at, mut accumulator, mut x) = (0, 0u32, 0);
        loop {
            let instruction = code[at];
            at += 1;
            let jump = |yes: bool| usize::from(if yes { instruction.jt } else { instruction.jf });
            let k = instruction.k;
            match instruction.code {
                LOAD => {
                    let from = k as usize;
                    accumulator = u32::from_le_bytes(data[from..from + 4].try_into().unwrap());
                }
                LOAD_NUMBER => accumulator = k,
                LOAD_X => x = k,
                TO_X => x = accumulator,
                AND => accumulator &= k,
                SHIFT_BY_X => accumulator >>= x,
                JUMP => at += k as usize,
                JUMP_EQUAL => at += jump(accumulator == k),
                JUMP_GREATER_OR_EQUAL => at += jump(accumulator >= k),
                JUMP_SET => at += jump(accumulator & k != 0),
                RETURN => return k,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn only_listed_calls_pass() {
        let allowed = [
            libc::SYS_write,
            libc::SYS_read,
            libc::SYS_exit_group,
            libc::SYS_close,
            libc::SYS_fstat,
            libc::SYS_open,
            libc::SYS_epoll_ctl,
        ];
        let verdict = |number| verdict(&FILTER, number, [0; 6]);
        for number in 0..1000 {
            let expected = if allowed.contains(&number) || number == libc::SYS_mmap {
                ALLOW
            } else {
                REFUSE
            };
            assert_eq!(verdict(number as u32), expected, "{number}");
        }
        // The x32 variants of the same calls.
        assert_eq!(verdict(0x4000_0000), REFUSE);
        assert_eq!(verdict(u32::MAX), REFUSE);
    }

    #[test]
    fn seccomp_rules_compare_arguments() {
        let verdict = |number: libc::c_long, arguments| verdict(&FILTER, number as u32, arguments);
        let ioctl = |request| verdict(libc::SYS_ioctl, [0, request, 0, 0, 0, 0]);
        assert_eq!(ioctl(7), ALLOW);
        assert_eq!(ioctl(9), ALLOW);
        assert_eq!(ioctl(8), REFUSE);
        let mmap = |protection| verdict(libc::SYS_mmap, [0, 0, protection, 0, 0, 0]);
        assert_eq!(mmap(3), ALLOW);
        assert_eq!(mmap(7), REFUSE);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Any number of calls may share a word, from none to all.
        #[test]
        fn any_list_of_calls_passes_and_no_other_call(
            calls in proptest::collection::btree_set(0_u32..480, 0..25),
            word in 0_u32..15,
            conditional in proptest::collection::btree_set(0_u32..480, 0..4),
        ) {
            let whole = (32 * word..32 * word + 32).collect();
            let calls: BTreeSet<u32> = &(&calls | &whole) - &conditional;
            let rules: Vec<Rule> = calls.iter().map(|number| call((*number).into())).collect();
            let looked_at: Vec<Rule> = conditional
                .iter()
                .map(|number| call_with((*number).into(), 2, &[5]))
                .collect();
            let filter = Filter::build(&[&rules, &looked_at], Refusal::Error);
            for number in (0..520).chain([0x4000_0000, u32::MAX]) {
                let named = conditional.contains(&number);
                for (third, expected) in [(5, named), (6, false)] {
                    let passes = verdict(&filter, number, [0, 0, third, 0, 0, 0]) == ALLOW;
                    prop_assert_eq!(passes, expected || calls.contains(&number), "{}", number);
                }
            }
        }
    }
}
