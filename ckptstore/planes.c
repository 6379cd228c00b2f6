/* What `planes.py` does for machines without a compiler: byte planes of chunks, and differences between chunks.

Every length comes from `planes.py`, which has checked it. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "elements of chunks are little-endian"
#endif

#define BLOCK 512 /* elements at a time, so that they stay in the first cache (own choice) */

/* The loops for one width. A compiler makes vectors of them only if it knows the width. */
#define WIDTH(type, bytes)                                                                                             \
  static void split_##bytes(const uint8_t *data, const uint8_t *base, size_t count, uint8_t *planes) {                 \
    type numbers[BLOCK], old[BLOCK];                                                                                   \
    for (size_t from = 0; from < count; from += BLOCK) {                                                               \
      size_t some = count - from < BLOCK ? count - from : BLOCK;                                                       \
      memcpy(numbers, data + from * bytes, some * bytes);                                                              \
      if (base != NULL) {                                                                                              \
        memcpy(old, base + from * bytes, some * bytes);                                                                \
        for (size_t i = 0; i < some; i++) {                                                                            \
          type moved = (type)(numbers[i] - old[i]), sign = (type)(0 - (moved >> (8 * bytes - 1)));                     \
          numbers[i] = (type)(moved << 1) ^ sign;                                                                      \
        }                                                                                                              \
      }                                                                                                                \
      for (size_t plane = 0; plane < bytes; plane++)                                                                   \
        for (size_t i = 0; i < some; i++) planes[plane * count + from + i] = (uint8_t)(numbers[i] >> 8 * plane);       \
    }                                                                                                                  \
  }                                                                                                                    \
  static void join_##bytes(const uint8_t *planes, const uint8_t *base, size_t count, uint8_t *data) {                  \
    type numbers[BLOCK], old[BLOCK];                                                                                   \
    for (size_t from = 0; from < count; from += BLOCK) {                                                               \
      size_t some = count - from < BLOCK ? count - from : BLOCK;                                                       \
      for (size_t i = 0; i < some; i++) {                                                                              \
        type number = 0;                                                                                               \
        for (size_t plane = 0; plane < bytes; plane++)                                                                 \
          number |= (type)((type)planes[plane * count + from + i] << 8 * plane);                                       \
        numbers[i] = number;                                                                                           \
      }                                                                                                                \
      if (base != NULL) {                                                                                              \
        memcpy(old, base + from * bytes, some * bytes);                                                                \
        for (size_t i = 0; i < some; i++)                                                                              \
          numbers[i] = (type)(((numbers[i] >> 1) ^ (type)(0 - (numbers[i] & 1))) + old[i]);                            \
      }                                                                                                                \
      memcpy(data + from * bytes, numbers, some * bytes);                                                              \
    }                                                                                                                  \
  }

WIDTH(uint16_t, 2)
WIDTH(uint32_t, 4)
WIDTH(uint64_t, 8)

void planes_split(const uint8_t *data, const uint8_t *base, size_t count, int width, uint8_t *planes) {
  (width == 2 ? split_2 : width == 4 ? split_4 : split_8)(data, base, count, planes);
}

void planes_join(const uint8_t *planes, const uint8_t *base, size_t count, int width, uint8_t *data) {
  (width == 2 ? join_2 : width == 4 ? join_4 : join_8)(planes, base, count, data);
}

void planes_xor(const uint8_t *one, const uint8_t *other, size_t length, uint8_t *out) {
  for (size_t i = 0; i < length; i++) out[i] = one[i] ^ other[i];
}
