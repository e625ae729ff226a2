"""Client of the recommendation endpoint for the checkout's own code; it needs httpx and nothing else.

Installed on its own (`pip install ./serving/client`), the package is called `checkout_recommender_client`:

    from checkout_recommender_client import Client, read_best_sellers
"""

from .answers import NotAnswered as NotAnswered
from .answers import Recommendations as Recommendations
from .answers import RecommendedItem as RecommendedItem
from .client import AsyncClient as AsyncClient
from .client import Client as Client
from .client import InvalidCall as InvalidCall
from .client import read_best_sellers as read_best_sellers
from .fakes import AsyncFakeClient as AsyncFakeClient
from .fakes import FakeClient as FakeClient
