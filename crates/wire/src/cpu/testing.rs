//! Processors for tests.

use super::{Leaf, Profile};
/// A processor of this vendor (12 letters, as `GenuineIntel`) whose highest basic leaf is `highest`,
/// with these leaves: number, index and registers.
pub fn processor(vendor: &str, highest: u32, leaves: &[(u32, u32, [u32; 4])]) -> Profile {
    let bytes: [u8; 12] = vendor.as_bytes().try_into().expect("twelve letters");
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
    let mut cpuid = vec![Leaf {
        leaf: 0,
        index: 0,
        // CPUID has the middle of the name in EDX.
        registers: [highest, word(0), word(8), word(4)],
    }];
    cpuid.extend(leaves.iter().map(|&(leaf, index, registers)| Leaf {
        leaf,
        index,
        registers,
    }));
    Profile::new(cpuid)
}
