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

/// Room for the largest program: jumps reach no farther.
pub const CAPACITY: usize = 256;

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
const JUMP_GREATER: u16 = 0x25;
const JUMP_GREATER_OR_EQUAL: u16 = 0x35;
const JUMP_SET: u16 = 0x45;
const JUMP_CLASS: u16 = 0x05;
const RETURN: u16 = 0x06;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
/// A signal to the thread, so that the handler can say what was asked for.
const REFUSE: u32 = libc::SECCOMP_RET_TRAP;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;

/// Jumps to the two answers, whose distance is not known yet.
const TO_ALLOW: u8 = 254;
const TO_REFUSE: u8 = 255;

/// Neighbouring calls that are allowed whatever their arguments, or one call.
#[derive(Clone, Copy)]
struct Group {
    first: u32,
    last: u32,
    rule: Rule,
}

impl Filter {
    /// Builds the program; the order of rules does not matter. Fails to
    /// compile if two rules are for one call or the program is too long.
    ///
    /// The kernel translates every program when a thread installs it, at a
    /// cost of some thousand instructions for each of the program's own: so
    /// neighbours are one range, and there is one answer of each kind.
    pub const fn build(lists: &[&[Rule]]) -> Filter {
        let mut rules = [call(0); MAX_RULES];
        let mut count = 0;
        let mut list = 0;
        while list < lists.len() {
            let mut i = 0;
            while i < lists[list].len() {
                insert(&mut rules, count, lists[list][i]);
                count += 1;
                i += 1;
            }
            list += 1;
        }
        let (groups, count) = join_neighbours(&rules, count);
        let mut filter = Filter {
            code: [instruction(RETURN, 0, 0, KILL); CAPACITY],
            length: 0,
        };
        filter.push(instruction(LOAD, 0, 0, ARCHITECTURE));
        filter.push(instruction(JUMP_EQUAL, 1, 0, AUDIT_ARCH_X86_64));
        filter.push(instruction(RETURN, 0, 0, KILL));
        filter.push(instruction(LOAD, 0, 0, NUMBER));
        filter.search(&groups, 0, count, false);
        filter.answer(TO_ALLOW, ALLOW);
        filter.answer(TO_REFUSE, REFUSE);
        filter
    }

    /// The instructions.
    pub const fn as_slice(&self) -> &[sock_filter] {
        self.code.split_at(self.length).0
    }

    /// Binary search among `groups[from..to]` for the number in the
    /// accumulator, which may be known to be at least the first's.
    const fn search(&mut self, groups: &[Group], from: usize, to: usize, reached: bool) {
        if to - from == 1 {
            return self.leaf(&groups[from], reached);
        }
        let middle = from + (to - from) / 2;
        let first = groups[middle].first;
        let fork = self.push(instruction(JUMP_GREATER_OR_EQUAL, 0, 0, first));
        self.search(groups, from, middle, reached);
        let distance = self.length - fork - 1;
        assert!(
            distance < TO_ALLOW as usize,
            "too many rules for a short jump"
        );
        self.code[fork].jt = distance as u8;
        self.search(groups, middle, to, true);
    }

    const fn leaf(&mut self, group: &Group, reached: bool) {
        let rule = &group.rule;
        let argument = ARGUMENTS + 8 * rule.argument as u32;
        match rule.check {
            Check::Any if group.first == group.last => {
                self.push(instruction(JUMP_EQUAL, TO_ALLOW, TO_REFUSE, group.first));
            }
            Check::Any => {
                if !reached {
                    self.push(instruction(
                        JUMP_GREATER_OR_EQUAL,
                        0,
                        TO_REFUSE,
                        group.first,
                    ));
                }
                self.push(instruction(JUMP_GREATER, TO_REFUSE, TO_ALLOW, group.last));
            }
            Check::NoneOf(bits) => {
                self.push(instruction(JUMP_EQUAL, 0, TO_REFUSE, group.first));
                self.push(instruction(LOAD, 0, 0, argument));
                self.push(instruction(JUMP_SET, TO_REFUSE, TO_ALLOW, bits));
            }
            Check::OneOf(values) => {
                self.push(instruction(JUMP_EQUAL, 0, TO_REFUSE, group.first));
                self.push(instruction(LOAD, 0, 0, argument));
                let mut i = 0;
                while i < values.len() {
                    let otherwise = if i + 1 == values.len() { TO_REFUSE } else { 0 };
                    self.push(instruction(JUMP_EQUAL, TO_ALLOW, otherwise, values[i]));
                    i += 1;
                }
            }
        }
    }

    /// Appends an answer and points the jumps that want it here.
    const fn answer(&mut self, wanted: u8, verdict: u32) {
        let at = self.push(instruction(RETURN, 0, 0, verdict));
        let mut i = 0;
        while i < at {
            let distance = at - i - 1;
            let jump = &mut self.code[i];
            if jump.code & 0x07 == JUMP_CLASS {
                assert!(
                    distance < TO_ALLOW as usize,
                    "too many rules for a short jump"
                );
                if jump.jt == wanted {
                    jump.jt = distance as u8;
                }
                if jump.jf == wanted {
                    jump.jf = distance as u8;
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

/// Calls with consecutive numbers and no conditions become one group.
const fn join_neighbours(rules: &[Rule; MAX_RULES], count: usize) -> ([Group; MAX_RULES], usize) {
    let mut groups = [Group {
        first: 0,
        last: 0,
        rule: rules[0],
    }; MAX_RULES];
    let mut length: usize = 0;
    let mut i = 0;
    while i < count {
        let rule = rules[i];
        let joins = length > 0
            && groups[length - 1].last + 1 == rule.number
            && matches!(rule.check, Check::Any)
            && matches!(groups[length - 1].rule.check, Check::Any);
        if joins {
            groups[length - 1].last = rule.number;
        } else {
            groups[length] = Group {
                first: rule.number,
                last: rule.number,
                rule,
            };
            length += 1;
        }
        i += 1;
    }
    (groups, length)
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
            call(libc::SYS_close),
            call(libc::SYS_fstat),
            call(libc::SYS_open),
            call(libc::SYS_epoll_ctl),
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
                JUMP_GREATER => at += jump(accumulator > k),
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
