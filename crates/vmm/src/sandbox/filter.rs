//! BPF programs from lists of system calls, made at compile time.
//!
//! Source: Linux `Documentation/userspace-api/seccomp_filter.rst`.

use libc::sock_filter;

/// One system call a thread may make.
#[derive(Clone, Copy)]
pub struct Rule {
    number: u32,
    argument: u8,
    check: Check,
}

#[derive(Clone, Copy)]
enum Check {
    Any,
    /// The argument's low 32 bits are one of these.
    OneOf(&'static [u32]),
    /// The argument's low 32 bits have none of these set.
    NoneOf(u32),
}

/// The call, whatever its arguments.
pub const fn call(number: libc::c_long) -> Rule {
    Rule {
        number: number as u32,
        argument: 0,
        check: Check::Any,
    }
}

/// The call, if this argument (from 0) has one of these values.
pub const fn call_with(number: libc::c_long, argument: u8, values: &'static [u32]) -> Rule {
    Rule {
        number: number as u32,
        argument,
        check: Check::OneOf(values),
    }
}

/// The call, if this argument (from 0) has none of these bits.
pub const fn call_without(number: libc::c_long, argument: u8, bits: u32) -> Rule {
    Rule {
        number: number as u32,
        argument,
        check: Check::NoneOf(bits),
    }
}

/// Room for the largest program.
pub const CAPACITY: usize = 512;

const MAX_RULES: usize = 128;

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
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER_OR_EQUAL: u16 = 0x35;
const JUMP_SET: u16 = 0x45;
const RETURN: u16 = 0x06;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
/// A signal to the thread, so that the handler can say what was asked for.
const REFUSE: u32 = libc::SECCOMP_RET_TRAP;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;

impl Filter {
    /// Builds the program; the order of rules does not matter. Fails to
    /// compile if two rules are for one call or the program is too long.
    pub const fn build(groups: &[&[Rule]]) -> Filter {
        let mut rules = [call(0); MAX_RULES];
        let mut count = 0;
        let mut group = 0;
        while group < groups.len() {
            let mut i = 0;
            while i < groups[group].len() {
                insert(&mut rules, count, groups[group][i]);
                count += 1;
                i += 1;
            }
            group += 1;
        }
        let mut filter = Filter {
            code: [instruction(RETURN, 0, 0, KILL); CAPACITY],
            length: 0,
        };
        filter.push(instruction(LOAD, 0, 0, ARCHITECTURE));
        filter.push(instruction(JUMP_EQUAL, 1, 0, AUDIT_ARCH_X86_64));
        filter.push(instruction(RETURN, 0, 0, KILL));
        filter.push(instruction(LOAD, 0, 0, NUMBER));
        filter.search(&rules, 0, count);
        filter
    }

    /// The instructions.
    pub const fn as_slice(&self) -> &[sock_filter] {
        self.code.split_at(self.length).0
    }

    /// Binary search among `rules[from..to]` for the number in the accumulator.
    const fn search(&mut self, rules: &[Rule], from: usize, to: usize) {
        if to - from == 1 {
            return self.leaf(&rules[from]);
        }
        let middle = from + (to - from) / 2;
        let fork = self.push(instruction(
            JUMP_GREATER_OR_EQUAL,
            0,
            0,
            rules[middle].number,
        ));
        self.search(rules, from, middle);
        let distance = self.length - fork - 1;
        assert!(distance <= 255, "too many rules for a short jump");
        self.code[fork].jt = distance as u8;
        self.search(rules, middle, to);
    }

    const fn leaf(&mut self, rule: &Rule) {
        self.push(instruction(JUMP_EQUAL, 1, 0, rule.number));
        self.push(instruction(RETURN, 0, 0, REFUSE));
        let argument = ARGUMENTS + 8 * rule.argument as u32;
        match rule.check {
            Check::Any => {}
            Check::NoneOf(bits) => {
                self.push(instruction(LOAD, 0, 0, argument));
                self.push(instruction(JUMP_SET, 0, 1, bits));
                self.push(instruction(RETURN, 0, 0, REFUSE));
            }
            Check::OneOf(values) => {
                self.push(instruction(LOAD, 0, 0, argument));
                let mut i = 0;
                while i < values.len() {
                    // To the ALLOW after the REFUSE after the last value.
                    let distance = values.len() - i;
                    assert!(distance <= 255, "too many values for a short jump");
                    self.push(instruction(JUMP_EQUAL, distance as u8, 0, values[i]));
                    i += 1;
                }
                self.push(instruction(RETURN, 0, 0, REFUSE));
            }
        }
        self.push(instruction(RETURN, 0, 0, ALLOW));
    }

    const fn push(&mut self, instruction: sock_filter) -> usize {
        let at = self.length;
        self.code[at] = instruction;
        self.length += 1;
        at
    }
}

/// Puts a rule in its place among the first `count`, which are sorted.
const fn insert(rules: &mut [Rule; MAX_RULES], count: usize, rule: Rule) {
    let mut at = count;
    while at > 0 && rules[at - 1].number >= rule.number {
        assert!(
            rules[at - 1].number != rule.number,
            "two rules for one call"
        );
        rules[at] = rules[at - 1];
        at -= 1;
    }
    rules[at] = rule;
}

const fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    static FILTER: Filter = Filter::build(&[
        &[
            call(libc::SYS_write),
            call_with(libc::SYS_ioctl, 1, &[7, 9]),
            call_without(libc::SYS_mmap, 2, 4),
        ],
        &[call(libc::SYS_read), call(libc::SYS_exit_group)],
    ]);

    /// Interprets the few instructions used.
    fn verdict(number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(AUDIT_ARCH_X86_64.to_le_bytes());
        data.extend([0; 8]);
        arguments
            .iter()
            .for_each(|argument| data.extend(argument.to_le_bytes()));
        let code = FILTER.as_slice();
        let (mut at, mut accumulator) = (0, 0u32);
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
        let allowed = [libc::SYS_write, libc::SYS_read, libc::SYS_exit_group];
        for number in 0..1000 {
            let expected = if allowed.contains(&number) || number == libc::SYS_mmap {
                ALLOW
            } else {
                REFUSE
            };
            assert_eq!(verdict(number as u32, [0; 6]), expected, "{number}");
        }
        // The x32 variants of the same calls.
        assert_eq!(verdict(0x4000_0000, [0; 6]), REFUSE);
        assert_eq!(verdict(u32::MAX, [0; 6]), REFUSE);
    }

    #[test]
    fn arguments_are_looked_at() {
        let ioctl = |request| verdict(libc::SYS_ioctl as u32, [0, request, 0, 0, 0, 0]);
        assert_eq!(ioctl(7), ALLOW);
        assert_eq!(ioctl(9), ALLOW);
        assert_eq!(ioctl(8), REFUSE);
        let mmap = |protection| verdict(libc::SYS_mmap as u32, [0, 0, protection, 0, 0, 0]);
        assert_eq!(mmap(3), ALLOW);
        assert_eq!(mmap(7), REFUSE);
    }
}
