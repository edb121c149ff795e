"""The thresholds by which products and attention are cut, and why; no other file of them has one.

They are the same on all machines. Those in the first part decide where a sum is cut, so they are part of the result:
with others it has other bits. Sizes are for a first-level cache of 32 KB and a second of 512 KB, and counted in words.
"""

# where a sum is cut into blocks, each summed by itself
DEPTH = 1024  # most k of a forward block: `tall` rows (192 KB) and a panel (64 KB) take half of L2. Of 16 floats a
# vector: 448 and 128 KB of the 1 MB or more that such machines have
INPUT_DEPTH = 768  # most k of a dinp block: the panel is 48 KB of L2
SHORT = 128  # tokens up to which a block of dinp has a depth of its own
FLOATS_DEPTH = 192  # that depth of floats: dout and dinp of few tokens are small, and a panel of 12 KB stays in L1
WORDS_DEPTH = INPUT_DEPTH  # of bfloat16: as for many tokens. At 64 tokens, 192 and 384 took 0.95 to 1.07 times as
# long: some layers of GPT-2 124M were faster and others slower, which is no reason for other bits
SHARED = 256  # tokens up to which dinp is summed by shares of weight's rows
SHARES = 16  # most of them: each needs the memory of a dinp
SHARE_ROWS = 64  # fewest rows of a share
WEIGHT_DEPTH = 512  # most tokens of a dweight block: a panel is 32 KB, the strip of dout 96 KB, that of dweight more
THIN = 32  # rows or columns of a thin gradient
THIN_DEPTH = 128  # k of a block of a thin gradient: the panel is 16 KB of L1
BLOCK = 64  # rows and columns of a tile of scores: 16 KB, half of L1

# what changes no bit
SLICE = 128  # k of a packing task
LEAST = 48  # rows of weight in a forward chunk, rounded up to whole tiles and vectors; of 16 floats a vector: 112
WIDE = 256  # tokens of a forward chunk: with 48 rows, a strip of sums of 48 KB; with 112, of 112 KB
INPUT_ROWS = 256  # tokens of a dinp chunk: enough to pay for copying a panel
COLUMNS = 384  # most columns of a dinp chunk
FEW = 5  # most products' rows of tokens for which dinp of floats reads weight in place: a copy would not pay
PACKED_ROWS = 16  # rows of dout that are packed at a time: they stay in L1 from group to group
OUTPUTS = 48  # columns of dout in a dweight chunk: each row of dweight has pages of its own, and 56 was no faster
STRIP = 65536  # floats of gradient in a strip: half of L2
TILED_TALL = 192  # rows of weight in a forward chunk on AMX, six groups of tiles: 112 would be three and a half
TILED_DEPTH = 128  # most tokens, in words, of a dweight block on AMX: 64 columns of dout take 32 KB of L1
TILED_OUTPUTS = 64  # columns of dout on AMX: two groups of tiles
TILED_STRIP = 3 * STRIP  # floats of a strip on AMX: 768 KB of the 2 MB of L2, for 64 rows of 3,072
LINE = 16  # floats in a cache line
POINTED = 7  # rows of a product that share a pointer, of which x86 reaches as many by three registers
ALIASED = 1024  # floats: rows that a multiple of it apart start on 4 KB share their places in L1
PLACES = 8  # the fewest lines that usual first-level caches hold at one place
READ_IN_PLACE = 8  # rows up to which a forward of int8 reads the weight in place: packing it would take longer
INT8_DEPTH = 2048  # most words of four int8 of a panel along the sum: of 32 columns, 256 KB of L2
INT8_ROWS = 1024  # most rows of a longer sum: theirs are kept between panels, of 32 columns 128 KB of L2
QUANTIZED = 16  # rows that a thread quantizes in one go
LOOKS = 2000  # spins before yielding the core: about a microsecond
